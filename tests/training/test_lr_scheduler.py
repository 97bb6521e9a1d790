"""The learning rate by hand."""

import pytest

from opensora.training.lr_scheduler import lr_at


def test_warm_up_then_constant():
    assert [lr_at(k, 1.0, warmup_steps=3) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_ends_at_zero():
    rates = [lr_at(k, 2.0, warmup_steps=2, schedule="cosine", total_steps=12) for k in range(13)]
    assert rates[2] == 2.0
    assert rates[7] == pytest.approx(1.0)
    assert rates[12] == pytest.approx(0.0, abs=1e-12)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_unknown_schedule():
    with pytest.raises(ValueError, match="'constant', 'cosine'"):
        lr_at(5, 1.0, schedule="linear")
