"""The benchmark of samplers covers every scheduler and counts how often one waits for the device."""

import pytest
import torch

from opensora.registry import SCHEDULERS
from tools.benchmark import sampler_overhead


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
