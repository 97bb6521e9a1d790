"""scripts/train.py with a model that reads conditioning frames as channels: trained, resumed to the bit, and sampled in its validation."""

import sys

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints
from opensora.models.vae.video import DiffusersVideoVAE
from tests.models.vaes import ARCHITECTURES
from tests.scripts.conftest import ROOT
from tests.scripts.runs import assert_same_run


@pytest.mark.slow
def test_an_image_to_video_model_trains_resumes_and_samples(
    train_script, toy_encoders, clips_csv, tmp_path, monkeypatch, capsys
):
    torch.manual_seed(0)
    architecture = {"type": "AutoencoderKLWan", **ARCHITECTURES["AutoencoderKLWan"]}
    DiffusersVideoVAE(architecture=architecture).save_pretrained(tmp_path / "vae")
    config = tmp_path / "i2v.py"
    config.write_text(
        f'''"""Toy."""
num_frames, image_size, data_path, num_workers = 9, (16, 24), {str(clips_csv)!r}, 0
dtype, device, seed, max_steps, log_every, ckpt_every, batch_size, lr = "fp32", "cpu", 7, 2, 1, 1, 2, 1e-3
model = dict(type="Wan2.2-I2V-A14B", expert="low", condition_channels=8, hidden_size=24, depth=1, num_heads=2, ffn_dim=32)
vae = dict(type="DiffusersVideoVAE", from_pretrained={str(tmp_path / "vae")!r})
text_encoder = dict(type="hf", from_pretrained={str(toy_encoders["text"])!r}, model_max_length=12)
scheduler = dict(type="rflow", num_sampling_steps=2, interval=(0.0, 0.9))
val_every, val_data_path, val_num_samples, val_num_timesteps = 2, {str(clips_csv)!r}, 2, 1
'''
    )
    prompts, image = tmp_path / "prompts.csv", next((ROOT / "assets/clips").rglob("*.mp4"))
    prompts.write_text(f"text,reference_path,mask_strategy\na dog,{image},0\n")

    def train(name, *options):
        monkeypatch.setattr(
            sys, "argv", ["train.py", str(config), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
        )
        train_script.main()
        return tmp_path / name

    whole = train("whole", f"--val-prompt-path={prompts}")
    assert (whole / "validation/step2/sample_0000.mp4").stat().st_size > 0
    assert "of the validation failed" not in (whole / "log.txt").read_text()
    assert '"val/loss_t450"' in (whole / "metrics.jsonl").read_text()  # of the expert's own times, 0 to 0.9
    assert "--image ... --prompt ..." in (whole / "log.txt").read_text()
    half = train("half", "--max-steps=1")
    rest = train("rest", f"--load={complete_checkpoints(half)[-1]}")
    assert_same_run(whole, rest)
    with pytest.raises(SystemExit):
        train("without", "--val-prompts", "a dog")
    assert (
        "prompt 0: Wan2.2-I2V-A14B makes videos from images: val_prompt_path takes a table" in capsys.readouterr().err
    )
    clip = (
        "--model.expert=both",
        "--model.image_dim=20",
        "--image-encoder={'type': 'clip-vision', 'from_pretrained': '-'}",
    )
    images = (
        "--bucket-config={'32x48': {9: (1.0, 1), 1: (1.0, 1)}}",
        "--dataset.type=VariableVideoTextDataset",
        "--model.boundary=None",
    )
    for dry in ("--dry-run=True", "--dry-run=False"):
        with pytest.raises(SystemExit):
            train(
                "images",
                *clip,
                *images,
                "--scheduler.interval=(0.0, 1.0)",
                "--val-every=0",
                "--val-data-path=None",
                dry,
            )
        assert "cannot train on single images" in capsys.readouterr().err
