"""scripts/train.py with validation: the training is the same as without."""

import json

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
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
