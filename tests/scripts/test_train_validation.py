"""scripts/train.py with validation: the training is the same as without."""

import json
import shlex

import numpy as np
import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
from opensora.config.load import InferenceConfig, parse_config
from opensora.datasets.video.read_video import read_frames
from opensora.inference.build import COMPONENTS
from opensora.inference.output import to_uint8
from opensora.inference.pipeline import VideoPipeline
from tests.scripts.runs import losses, tensors


@pytest.mark.slow
def test_validation_changes_nothing_and_leaves_its_results(train, clips_csv):
    options = ("--max-steps=4", "--ckpt-every=4")
    plain = train(*options, name="plain")
    watched = train(
        *options,
        "--val-every=2",
        f"--val-data-path={clips_csv}",
        "--val-num-samples=4",
        "--val-num-timesteps=2",
        "--val-prompts",
        "a grey rabbit",
        "the sky of a city",
        "--val-scheduler={'type': 'iddpm', 'num_sampling_steps': 2}",
        name="watched",
    )
    entries = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    assert [e["loss"] for e in entries if "loss" in e] == losses(plain)
    for part in ("model", "ema", "optimizer"):
        a, b = tensors(plain, part), tensors(watched, part)
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert [e["step"] for e in entries if "val/loss" in e] == [2, 4]
    assert {p.name for p in (watched / "validation").iterdir()} == {"step2", "step4"}
    assert (watched / "validation/step4/sheet.jpg").stat().st_size > 0
    assert open_checkpoint(complete_checkpoints(watched)[-1]).manifest["config"]["val_every"] == 2


OWN_SAMPLER = """
import os, signal
from pathlib import Path
from opensora.registry import SCHEDULERS
from opensora.schedulers.iddpm.iddpm import IDDPM

RUN = Path({run!r})


@SCHEDULERS.register_module({name!r})
class OwnSampler(IDDPM):
    def sample_steps(self, *args, **kwargs):
        with (RUN / "seen.txt").open("a") as seen:
            print(*sorted(path.name for path in RUN.glob("epoch*")), file=seen)
        {then}
"""
OPTIONS = (
    "--val-every=2",
    "--val-prompts",
    "a grey rabbit",
    "a dog",
    "--ckpt-async=False",
    "--val-scheduler.num-sampling-steps=2",
)


@pytest.mark.usefixtures("forget_own_parts")
def test_a_validation_that_fails_comes_after_its_checkpoint_and_ends_nothing(train, tmp_path):
    own = tmp_path / "own_sampler.py"
    own.write_text(
        OWN_SAMPLER.format(name=own.stem, run=str(tmp_path / "run"), then="raise AttributeError('no levels')")
    )
    run = train(*OPTIONS, f"--val-scheduler.type={own.stem}", f"--imports={own}", "--max-steps=4")
    seen = (run / "seen.txt").read_text().splitlines()
    assert seen == ["epoch0-global_step2", "epoch0-global_step2 epoch0-global_step4"]
    assert len(complete_checkpoints(run)) == 2
    log = (run / "log.txt").read_text()
    assert log.count("sampling of the validation failed") == log.count("AttributeError: no levels") == 2
    assert "Traceback" in log


@pytest.mark.usefixtures("forget_own_parts")
def test_ctrl_c_in_a_validation_saves_and_says_how_to_resume(train, tmp_path, toy_config):
    own = tmp_path / "own_interrupt.py"
    then = "os.kill(os.getpid(), signal.SIGINT); return super().sample_steps(*args, **kwargs)"
    own.write_text(OWN_SAMPLER.format(name=own.stem, run=str(tmp_path / "run"), then=then))
    run = train(*OPTIONS, f"--val-scheduler.type={own.stem}", f"--imports={own}", "--max-steps=9", "--ckpt-every=2")
    assert len((run / "seen.txt").read_text().splitlines()) == 1  # the second prompt is left out
    assert complete_checkpoints(run)[-1].name == "epoch0-global_step3"
    *_, stopped, command = (run / "log.txt").read_text().splitlines()
    assert "Ctrl-C" in stopped
    assert command.startswith("to resume: cd ")
    words = shlex.split(command.partition(" && ")[2])
    assert words[:3] == ["python", "train.py", str(toy_config)]
    assert words[-2:] == ["--load", "latest"]


def test_the_last_line_is_a_command_that_samples(train, tmp_path):
    """In a config's place, the checkpoint's folder."""
    run = train("--val-every=4", "--val-prompts", "a dog", "--val-scheduler={'type': 'iddpm', 'num_sampling_steps': 2}")
    words = shlex.split((run / "log.txt").read_text().splitlines()[-1].partition("to sample: ")[2])
    assert words[:3] == ["python", "scripts/inference.py", str(run / "epoch0-global_step4")]
    cfg = parse_config(InferenceConfig, COMPONENTS, words[2:])
    assert (cfg.num_frames, cfg.image_size, cfg.fps, cfg.prompt) == (2, (16, 24), 12, ["..."])
    video = VideoPipeline.from_config(cfg)(["a dog"], seed=7)[0]
    of_validation = read_frames(run / "validation/step4/sample_0000.mp4", 0, 2)
    assert np.abs(to_uint8(video) - of_validation.numpy().astype(float)).mean() < 12  # H.264
