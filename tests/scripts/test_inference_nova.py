"""scripts/inference.py with NOVA at toy size: text to image, text to video, image to video; a model that training wrote."""

import json
import runpy
import sys
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import save_file

from opensora.registry import MODELS

SCRIPT = Path(__file__).parents[2] / "scripts" / "inference.py"
SIZES = {"width": 32, "num_heads": 2, "video_depth": 1, "image_depth": 2, "head_depth": 1}
CONFIG = """
num_frames = {frames}
fps = 12
image_size = (32, 64)
model = dict(type="NOVA", motion={motion}, from_pretrained="nova.safetensors", mixer_rank={mixer}, **{sizes})
vae = dict(type="VideoAutoencoderKL", from_pretrained={vae!r})
text_encoder = dict(type="hf", from_pretrained={text!r}, model_max_length=12)
scheduler = dict(type="nova", num_sampling_steps=3, num_diffusion_steps=2, cfg_scale=2.0)
dtype = "fp32"
device = "cpu"
prompt = ["a white dog", "the grey rabbit in the city"]
save_dir = "samples"
"""


@pytest.fixture
def sample(tmp_path, toy_encoders, monkeypatch):
    """Run the script with some options; returns the samples' pixels [T, H, W, 3] by prompt, and the last one's record."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str, frames=3, motion=True, mixer=0):
        torch.manual_seed(0)
        model = MODELS.build(
            {
                "type": "NOVA",
                **SIZES,
                "motion": motion,
                "mixer_rank": mixer,
                "caption_channels": 16,
                "model_max_length": 12,
            }
        )
        state = {name: 0.2 * torch.randn(w.shape) for name, w in model.state_dict().items()}
        save_file(state, "nova.safetensors")
        vae, text = str(toy_encoders["vae"]), str(toy_encoders["text"])
        content = CONFIG.format(frames=frames, motion=motion, mixer=mixer, sizes=SIZES, vae=vae, text=text)
        Path("config.py").write_text(content)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "config.py", *options])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        folder = next((Path(o.partition("=")[2]) for o in options if o.startswith("--save-dir=")), Path("samples"))
        files = sorted(path for path in folder.iterdir() if path.suffix != ".json")
        return [pixels(path) for path in files], json.loads(files[-1].with_suffix(".json").read_text())

    return run


def pixels(path: Path) -> np.ndarray:
    if path.suffix == ".mp4":
        with av.open(path) as video:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    return np.asarray(PIL.Image.open(path).convert("RGB"))[None]


def test_text_to_image(sample):
    images, record = sample(frames=1, motion=False)
    assert [image.shape for image in images] == [(1, 32, 64, 3)] * 2
    assert (record["prompt"], record["config"]["scheduler"]["type"]) == ("the grey rabbit in the city", "nova")
    assert not np.array_equal(*images)
    again, _ = sample("--save-dir=again", "--batch-size=2", frames=1, motion=False)
    for image, other in zip(images, again, strict=True):
        assert np.abs(image.astype(int) - other).max() <= 1  # in a batch as alone


@pytest.mark.parametrize("mixer", [0, 4])
def test_text_to_video(sample, mixer):
    videos, _ = sample(mixer=mixer)
    assert [video.shape for video in videos] == [(3, 32, 64, 3)] * 2
    assert all(video.std() > 1 for video in videos)
    faster, record = sample("--motion-flow=20", "--save-dir=faster", mixer=mixer)
    assert record["config"]["motion_flow"] == 20
    assert not np.array_equal(faster[0], videos[0])


@pytest.mark.slow
def test_image_to_video(sample, toy_encoders):
    """The first frame is the image, as the VAE gives it back; what follows depends on it."""
    from opensora.models.vae.vae import VideoAutoencoderKL

    first = np.kron(np.random.default_rng(0).integers(0, 256, (4, 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
    PIL.Image.fromarray(first).save("first.png")
    PIL.Image.fromarray(255 - first).save("other.png")
    videos, _ = sample("--image=first.png", "--vae.posterior=mode")
    vae = VideoAutoencoderKL(str(toy_encoders["vae"]), posterior="mode").eval()
    x = torch.from_numpy(first).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        z = vae.sample(vae.moments(x), None)
        kept = ((vae.decode(z)[0, :, 0].permute(1, 2, 0).clamp(-1, 1) + 1) * 127.5).numpy()
    assert [video.shape for video in videos] == [(3, 32, 64, 3)] * 2
    for video in videos:
        alike = [np.corrcoef(frame.mean(2).flat, kept.mean(2).flat)[0, 1] for frame in video]
        assert alike[0] > 0.85  # what is missing is the compression of a small video
        assert max(alike[1:]) < 0.5
    other, _ = sample("--image=other.png", "--vae.posterior=mode", "--save-dir=other")
    assert not np.array_equal(other[0][2], videos[0][2])
