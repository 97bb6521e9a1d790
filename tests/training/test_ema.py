"""The average against fp64, and what it does with buffers and frozen weights; sharded: tests/acceleration/test_fsdp2.py."""

import pytest
import torch
from torch import nn

from opensora.training.ema import EMA
from opensora.utils.errors import UserError


def test_ten_thousand_bf16_steps_match_fp64():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    ema, exact = EMA(model, 0.9999), 1.0
    for step in range(1, 10_001):
        weight = 1 + step % 2 * 2**-7  # two neighbouring bf16 numbers, whose mean is none
        model.weight.detach().fill_(weight)
        ema.update(model, step)
        decay = min(0.9999, (1 + step) / (10 + step))
        exact = decay * exact + (1 - decay) * weight
    assert abs(float(ema.state_dict()["weight"]) - exact) < 1e-5


def test_decay_warms_up():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = EMA(model, 0.9999)
    nn.init.ones_(model.weight)
    ema.update(model, 1)
    assert abs(float(ema.state_dict()["weight"]) - (1 - 2 / 11)) < 1e-6


def test_a_skipped_step_costs_no_other(monkeypatch):
    """Weights that count the steps: the average lags behind them by as much as if the tenth of ten had been taken."""
    model = nn.Linear(1, 1, bias=False)

    def lag(skipped: set[int]) -> float:
        ema = EMA(model, 0.9, every=10)
        for step in range(1, 201):
            if step not in skipped:
                nn.init.constant_(model.weight, float(step))
            ema.update(model, step, taken=step not in skipped)
        return 200 - float(ema.state_dict()["weight"])

    assert abs(lag({190}) - lag(set())) < 1  # without the tenth it was 10 * 0.9^10 = 3.5 more
    assert lag(set(range(10, 210, 10))) < 10  # all windows count


def test_buffers_and_frozen_weights_are_copied():
    model = nn.BatchNorm1d(2)
    model.weight.requires_grad_(False)
    ema = EMA(model, 0.9)
    model.running_mean.fill_(5.0)
    model.num_batches_tracked.fill_(3)
    with torch.no_grad():
        model.weight.fill_(7.0)
    ema.update(model, 1000)
    state = ema.state_dict()
    assert (state["running_mean"] == 5).all()
    assert state["num_batches_tracked"] == 3
    assert (state["weight"] == 7).all()


def test_tied_weights_are_averaged_under_both_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    ema = EMA(model, 0.5)
    expected = model[0].weight.detach().clone()
    for step in range(100, 103):
        with torch.no_grad():
            model[0].weight += 1
        ema.update(model, step)
        expected.lerp_(model[0].weight.detach(), 0.5)
    for name in ("0.weight", "1.weight"):
        torch.testing.assert_close(ema.state_dict()[name], expected)
    with ema.applied_to(model):
        torch.testing.assert_close(model[1].weight.detach(), expected)


def test_the_average_is_its_own_memory():
    model = nn.Linear(2, 2)
    ema = EMA(model, 0.9)
    before = ema.state_dict()["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(ema.state_dict()["weight"], before)


def test_state_round_trip():
    a, b = EMA(nn.Linear(2, 2), 0.9), EMA(nn.Linear(2, 2), 0.9)
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(a.state_dict(), b.state_dict())


def test_every_n_steps_decays_as_much_as_n_updates():
    """Weights that stand still between updates are averaged alike, the warm-up of the decay included."""
    model = nn.Linear(1, 1, bias=False)
    each, every = EMA(model, 0.8), EMA(model, 0.8, every=4)
    for step in range(1, 41):
        if step % 4 == 1:
            nn.init.constant_(model.weight, float(step))
        each.update(model, step)
        every.update(model, step)
        if step % 4 == 0:
            torch.testing.assert_close(every.state_dict()["weight"], each.state_dict()["weight"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", ["model", "cpu"])
def test_applied_and_taken_back_bit_for_bit(device):
    model = nn.BatchNorm1d(3).bfloat16()
    ema = EMA(model, 0.9, device=device)
    with torch.no_grad():
        model.weight.normal_()
    ema.update(model, 1)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ema.applied_to(model):
        assert torch.equal(model.weight, ema.state_dict()["weight"].bfloat16())
        assert not torch.equal(model.weight, trained["weight"])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(KeyError), ema.applied_to(model):
        raise KeyError
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    assert model.weight.requires_grad


def test_ema_weights_of_another_model_are_refused():
    ema = EMA(nn.Linear(2, 2), 0.9)
    with pytest.raises(UserError, match="of another model: 1 names are only here or only there, such as bias"):
        ema.load_state_dict({"weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match=r"of another model: weight: the stored shape is \(3, 2\)"):
        ema.load_state_dict({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})
