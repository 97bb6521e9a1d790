"""scripts/inference_vae.py on a real clip and an image: what it writes is the original next to what the VAE makes of it."""

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.video.read_video import probe, read_frames
from opensora.models.vae import DiffusersVideoVAE

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "assets" / "clips" / "white_dog.mp4"  # 41 frames, 320 x 180
ARCHITECTURE = {
    "type": "AutoencoderKLWan", "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1,
    "temperal_downsample": [True], "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
    "latents_mean": None, "latents_std": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("inference_vae_script", ROOT / "scripts" / "inference_vae.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    DiffusersVideoVAE(architecture=ARCHITECTURE).save_pretrained(folder)
    return folder


@pytest.fixture
def run(script, vae, tmp_path, monkeypatch):
    def run(*options):
        config = str(ROOT / "configs" / "vae" / "inference" / "video.py")
        argv = [
            "inference_vae.py",
            config,
            f"--ckpt-path={vae}",
            f"--save-dir={tmp_path / 'out'}",
            "--device=cpu",
            *options,
        ]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        script.main()
        return tmp_path / "out"

    return run


@pytest.fixture
def image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (34, 49, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    return tmp_path / "noise.png", pixels


def test_originals_stand_next_to_reconstructions(run, image, vae, capsys):
    path, pixels = image
    out = run("--num-frames=5", "--image-size", 48, 64, "--files", CLIP, path)
    clip = probe(out / "white_dog.mp4")
    assert clip[:3] == (5, 48, 128)
    assert clip.fps == pytest.approx(probe(CLIP).fps, abs=0.01)
    assert {p.name for p in out.iterdir()} == {"white_dog.mp4", "noise.png", "sheet.png"}
    assert "PSNR" in capsys.readouterr().out

    out = run("--files", path)  # its own size, cut to cells of 4 pixels from the middle
    frame = np.asarray(Image.open(out / "noise.png"))
    assert frame.shape == (32, 96, 3)
    original = pixels[1:33, 0:48]
    assert np.array_equal(frame[:, :48], original)
    model = DiffusersVideoVAE(str(vae), posterior="mode").eval()
    x = torch.from_numpy(original.copy()).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        expected = (model.decode(model.encode(x), num_frames=1).clamp(-1, 1)[0, :, 0].permute(1, 2, 0) + 1) * 127.5
    assert np.abs(frame[:, 48:] - expected.numpy()).max() < 0.51


def test_a_whole_video_is_the_longest_that_the_vae_takes(run, tmp_path):
    frames = read_frames(CLIP, 0, 8)[:, :32, :32]
    from opensora.datasets.transforms import to_float
    from opensora.inference.output import save_sample

    short = save_sample(to_float(frames), tmp_path / "short", 10)
    table = tmp_path / "table.csv"
    table.write_text(f"path\n{short.name}\n")
    assert probe(run("--data-path", table) / "short.mp4").num_frames == 5  # 4k + 1, of 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to reconstruct"),
        (["--files", "nowhere.mp4"], "there is no nowhere.mp4"),
        (["--num-frames=4", "--files", CLIP], "does not take that many; the nearest is 5"),
        (["--num-frames=45", "--files", CLIP], "too few for num_frames=45"),
    ],
)
def test_mistakes_end_with_exit_code_2(run, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        run(*options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_no_source_is_replaced(run, tmp_path, image, capsys):
    """The result of a.mp4 is called a.mp4; that of sheet.png is not the sheet."""
    video = tmp_path / "out" / "a.mp4"
    video.parent.mkdir()
    shutil.copy(CLIP, video)
    with pytest.raises(SystemExit) as stop:
        run("--files", video, "--num-frames=5")
    assert stop.value.code == 2
    assert "a.mp4 is one of the files to reconstruct, and would be replaced" in capsys.readouterr().err
    assert video.read_bytes() == CLIP.read_bytes()
    video.unlink()
    named = image[0].rename(image[0].with_name("sheet.png"))
    out = run("--files", named)
    assert sorted(file.name for file in out.iterdir()) == ["0000_sheet.png", "sheet.png"]
