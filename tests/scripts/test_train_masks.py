"""scripts/train.py with conditioning frames (mask_ratios): the same rules of batches, accumulation and resume as without."""

import json
from pathlib import Path

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
from opensora.utils.errors import UserError

MASKS = ("--num-frames=4", "--mask-ratios", '{"random": 0.5, "image_head": 0.25}')


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return open_checkpoint(complete_checkpoints(run)[-1]).tensors("model")


@pytest.mark.slow
def test_masks_are_trained_on_and_resumed(train):
    plain, masked = train("--num-frames=4", name="plain"), train(*MASKS, name="masked")
    assert all(0 < loss < 10 for loss in losses(masked))
    assert losses(plain) != losses(masked)
    train(*MASKS, "--max-steps=2", name="half")
    load = complete_checkpoints(masked.parent / "half")[-1]
    rest = train(*MASKS, f"--load={load}", name="rest")
    assert losses(masked)[2:] == losses(rest)
    assert all(torch.equal(a, b) for a, b in zip(weights(masked).values(), weights(rest).values(), strict=True))


@pytest.mark.slow
def test_masks_do_not_depend_on_how_a_batch_is_cut(train):
    whole = train(*MASKS, "--batch-size=4", name="whole")
    cut = train(*MASKS, "--batch-size=2", "--accumulation-steps=2", name="cut")
    torch.testing.assert_close(losses(whole), losses(cut), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights(whole), weights(cut), atol=2e-5, rtol=1e-4)


def test_mistakes_are_told_before_anything_is_built(train, capsys):
    for options, message in (
        (("--num-frames=4", "--mask-ratios.imag_head=0.1"), "'imag_head' is unknown"),
        (("--num-frames=1", "--mask-ratios.image_head=0.1"), "has no effect with num_frames=1: an image"),
    ):
        with pytest.raises((SystemExit, UserError)):
            train(*options)
        assert message in capsys.readouterr().err
