"""The learning rate by hand."""

import pytest

from opensora.config.schema import LoopConfig
from opensora.training.loop import learning_rate


def rates(steps: int, total_steps: int = 0, **settings) -> list[float]:
    cfg = LoopConfig(**settings)
    return [learning_rate(cfg, step, total_steps) for step in range(steps)]


def test_warm_up_then_constant():
    assert rates(5, lr=1.0, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_ends_at_zero():
    found = rates(13, 12, lr=2.0, warmup_steps=2, lr_schedule="cosine")
    assert found[2] == 2.0
    assert found[7] == pytest.approx(1.0)
    assert found[12] == pytest.approx(0.0, abs=1e-12)
    assert found[2:] == sorted(found[2:], reverse=True)
