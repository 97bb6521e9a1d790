"""What a training leaves in its folder."""

import json
from pathlib import Path

import torch

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint


def logged(run: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return logged(run, "loss")


def all_losses(run: Path) -> list[tuple[str, float]]:
    """Those of validations too, by name."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(key, value) for entry in entries for key, value in entry.items() if "loss" in key]


def tensors(run: Path, part: str) -> dict[str, torch.Tensor]:
    return open_checkpoint(complete_checkpoints(run)[-1]).tensors(part)


def assert_same_run(a: Path, b: Path) -> None:
    for part in ("model", "ema", "optimizer"):
        left, right = tensors(a, part), tensors(b, part)
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
