"""The VAEs in assets/models: small enough, good on a clip that they never saw, and causal where they say so."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from opensora.datasets.transforms import to_float
from opensora.datasets.video.read_video import read_frames
from opensora.models.vae.metrics import quality, reconstruct
from tests.datasets.video.videos import CLIPS
from tools.eval_vae import load_vae

MODELS = Path(__file__).parents[3] / "assets" / "models"
SHIPPED = sorted(path.name for path in MODELS.glob("vae-*"))
FRAMES = slice(42, 138), slice(40, 168)  # of the 180 x 320 pixels


@pytest.fixture(scope="module")
def clip():
    """A held-out clip [1, 3, 5, 96, 128]."""
    rows, columns = FRAMES
    return to_float(read_frames(CLIPS / "white_dog.mp4", 4, 5)[:, rows, columns])[None]


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_small_and_good(name, clip):
    assert (MODELS / name / "diffusion_pytorch_model.safetensors").stat().st_size <= 16e6
    measured = quality(reconstruct(load_vae(str(MODELS / name)), clip), clip)
    assert measured.psnr > 27
    assert measured.ssim > 0.8
    assert measured.saturation == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("name", [name for name in SHIPPED if "video" in name])
def test_no_frame_sees_a_later_one(name, clip):
    vae = load_vae(str(MODELS / name))
    other = torch.cat([clip[:, :, :1], -clip[:, :, 1:]], dim=2)
    with torch.no_grad():
        z, z_other = vae.encode(clip), vae.encode(other)
        assert_close(z[:, :, 0], z_other[:, :, 0])
        assert not torch.allclose(z[:, :, 1], z_other[:, :, 1])
        first = vae.decode(z[:, :, :1], num_frames=1)
        assert_close(vae.decode(z, num_frames=5)[:, :, :1], first, rtol=1e-4, atol=1e-4)
