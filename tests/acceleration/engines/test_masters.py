"""An optimizer's state comes back as it was, whatever the optimizer and the shapes of its weights."""

import pytest
import torch
from torch import nn

from opensora.acceleration.engines.masters import Masters

OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "NAdam": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "Adafactor": {},
}


def made(name: str, device: str = "cpu", **settings: object) -> Masters:
    """Of a matrix, and of a number, whose moments have the shape of a counter."""
    torch.manual_seed(0)
    weights = {
        "w": nn.Parameter(torch.randn(3, 2, device=device)),
        "scale": nn.Parameter(torch.randn((), device=device)),
    }
    return Masters(getattr(torch.optim, name)(weights.values(), lr=0.01, **settings), weights, weights)


def step(masters: Masters, gradient: float) -> None:
    for weight in masters.weights.values():
        weight.grad = torch.full_like(weight, gradient)
    masters.optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_round_trips(name):
    before, after = made(name, **OPTIMIZERS[name]), made(name, **OPTIMIZERS[name])
    for masters in (before, after):
        step(masters, 0.5)
    after.load_state({path: value.clone() for path, value in before.state().items()})
    for gradient in (0.1, -0.7):
        step(before, gradient)
        step(after, gradient)
    assert before.state().keys() == after.state().keys()
    assert all(torch.equal(before.weights[path], after.weights[path]) for path in before.weights)


@pytest.mark.parametrize(("settings", "counts_on"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_count_of_a_weight_that_is_a_number_is_none_of_its_moments(settings, counts_on):
    """On a GPU, which "meta" stands for, each step would wait for a count that is there."""
    masters = made("AdamW", "meta", **settings)
    masters.load_state({"scale/step": torch.tensor(3.0), "scale/exp_avg": torch.tensor(0.5)})
    state = masters.optimizer.state[masters.weights["scale"]]
    assert {key: value.device.type for key, value in state.items()} == {"step": counts_on, "exp_avg": "meta"}
