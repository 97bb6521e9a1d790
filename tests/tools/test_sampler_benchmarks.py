"""The tools that measure samplers and timestep strategies run, and compare what they say they compare."""

import pytest
import torch

from opensora.registry import SCHEDULERS
from tools.benchmark import sampler_overhead, timestep_strategies
from tools.benchmark.timestep_strategies import STRATEGIES, Law, law_of, train


def test_every_scheduler_is_timed():
    assert {config["type"] for config in sampler_overhead.SAMPLERS.values()} == set(SCHEDULERS.choices()) - {
        "iddpm-speed",
        "nova",  # whose model does more than a step
    }


@pytest.mark.parametrize("mask", sampler_overhead.MASKS)
@pytest.mark.parametrize("name", sampler_overhead.SAMPLERS)
def test_no_sampler_reads_a_tensor_on_the_host(name, mask):
    """On a CPU only aten::item shows; `python -m tools.benchmark.sampler_overhead` counts the rest on a GPU."""
    run = sampler_overhead.sampling(
        sampler_overhead.SAMPLERS[name], 1, (2, 2, 2), torch.device("cpu"), mask, drawn="cpu"
    )
    assert run(4).shape == (1, 4, 2, 2, 2)
    assert sampler_overhead.waits_per_step(run, 3) == 0


def test_waits_are_counted():
    def run(num_steps: int) -> torch.Tensor:
        for _ in range(num_steps):
            torch.ones(1).item()
        return torch.ones(1)

    assert sampler_overhead.waits_per_step(run, 4) == 1


def test_a_law_draws_its_density():
    u = (torch.arange(100_000) + 0.5) / 100_000
    t = law_of(STRATEGIES["SpeeDiT, both"]).draw(u.reshape(10, -1)).flatten()
    assert float((t < 642).float().mean()) == pytest.approx(0.949, abs=0.001)  # the density's own mass there
    t = law_of(STRATEGIES["uniform"]).draw(u)
    assert torch.equal(t.bincount(minlength=1000), torch.full((1000,), 100))


def test_runs_of_a_seed_differ_by_their_law_alone():
    uniform, speed = law_of({}), law_of(STRATEGIES["SpeeD, both"])
    doubled = Law(uniform.cumulative, 2 * uniform.weights)  # the same up to Adam's epsilon
    curves = train([uniform, speed, uniform, doubled], [0, 1], num_steps=3, batch=16, measure_at=[3])
    assert curves.excess_loss.shape == curves.distance.shape == (1, 4, 2)
    assert torch.equal(curves.excess_loss[:, 0], curves.excess_loss[:, 2])
    assert torch.equal(curves.distance[:, 0], curves.distance[:, 2])
    torch.testing.assert_close(curves.excess_loss[:, 0], curves.excess_loss[:, 3], rtol=1e-3, atol=0)
    assert not torch.allclose(curves.excess_loss[:, 0], curves.excess_loss[:, 1])
    assert not torch.allclose(curves.excess_loss[:, 0, 0], curves.excess_loss[:, 0, 1])


def test_an_exact_network_has_no_excess_loss(monkeypatch):
    class Exact(timestep_strategies.Networks):
        def forward(self, x, t):
            abar = torch.from_numpy(timestep_strategies.ALPHAS_CUMPROD)[t[0]]  # [N]
            points = x.double().reshape(-1, 2, 1, 1, 1)
            eps = timestep_strategies.MIXTURE.x_0_and_eps(points, abar.sqrt(), (1 - abar).sqrt())[1]
            return eps.reshape(x.shape).float()

    assert float(timestep_strategies.excess_loss(Exact([0]))) < 1e-9
    assert float(timestep_strategies.excess_loss(timestep_strategies.Networks([0]))) > 0.1
