"""An optimizer's state comes back as it was, whatever the optimizer and the shapes of its weights."""

import pytest
import torch
from torch import nn

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import Engine, build_engine
from opensora.training.optimizers import ChainedOptimizer

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


class Scaled(nn.Module):
    """A matrix, and a scalar, whose moments have the shape of a counter."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 2, device=device))
        self.scale = nn.Parameter(torch.randn((), device=device))


def made(name: str, device: str = "cpu", **settings: object) -> Engine:
    model = Scaled(device)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)
    return build_engine("ddp", model, optimizer, World(0, 1, torch.device(device)), dtype="fp32")


def step(engine: Engine, gradient: float) -> None:
    for weight in engine.model.parameters():
        weight.grad = torch.full_like(weight, gradient)
    engine.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_round_trips(name):
    before, after = made(name, **OPTIMIZERS[name]), made(name, **OPTIMIZERS[name])
    for engine in (before, after):
        step(engine, 0.5)
    after.load_optimizer_state({path: value.clone() for path, value in before.optimizer_state().items()})
    for gradient in (0.1, -0.7):
        step(before, gradient)
        step(after, gradient)
    assert before.optimizer_state().keys() == after.optimizer_state().keys()
    weights, expected = after.model_state(), before.model_state()
    assert all(torch.equal(weights[path], expected[path]) for path in expected)


@pytest.mark.parametrize(("settings", "counts_on"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_count_of_a_weight_that_is_a_number_is_none_of_its_moments(settings, counts_on):
    """On a GPU, which "meta" stands for, each step would wait for a count that is there."""
    engine = made("AdamW", "meta", **settings)
    engine.load_optimizer_state({"scale/step": torch.tensor(3.0), "scale/exp_avg": torch.tensor(0.5)})
    state = engine.optimizer.state[engine.model.scale]
    assert {key: value.device.type for key, value in state.items()} == {"step": counts_on, "exp_avg": "meta"}


def test_each_of_chained_optimizers_counts_where_it_does_alone():
    model = Scaled("meta")
    on_cpu, on_device = (torch.optim.AdamW([w], capturable=on) for w, on in ((model.w, False), (model.scale, True)))
    engine = build_engine(
        "ddp", model, ChainedOptimizer(on_cpu, on_device), World(0, 1, torch.device("meta")), dtype="fp32"
    )
    engine.load_optimizer_state({f"{name}/step": torch.tensor(3.0) for name in ("w", "scale")})
    assert on_cpu.state[model.w]["step"].device.type == "cpu"
    assert on_device.state[model.scale]["step"].device.type == "meta"
