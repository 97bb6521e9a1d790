"""The order of every deterministic sampler: how fast its error falls with the number of calls of the model.

    python -m tools.benchmark.solver_order [--steps 24 48 96 192 384] [--plot docs/images/solver_order.png]

The model is the exact denoiser of a Gaussian mixture in the plane (tools/benchmark/toy_mixture.py), all in fp64. A sampler of
order p has an error of O(N^-p) against the exact solution of the ODE, which a third-order solver with 6000 steps stands for.
Prints a markdown table: the error at the most steps, and the order, from the last doubling of the steps.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.noise_schedule import named_schedule
from tools.benchmark.toy_mixture import GaussianMixture, rectified_flow, variance_preserving

STEPS = (24, 48, 96, 192, 384)
MIXTURE = GaussianMixture(num_modes=3, radius=1.0, std=0.5)  # smooth, so that few steps show the asymptotic order
DPM: dict[str, Any] = {"type": "dpm-solver", "skip_type": "logSNR", "lower_order_final": "never"}


class Case(NamedTuple):
    """A sampler, the order that its theory states, and a fine sampler of the same ODE, from the same to the same level."""

    sampler: dict[str, Any]
    order: int
    reference: dict[str, Any]


def cases() -> dict[str, Case]:
    """By name."""
    fine = {**DPM, "order": 3, "num_sampling_steps": 6000}
    found = {"DDIM": Case(DDIM, 1, {**fine, "final": "denoise_to_zero"})}
    for algorithm in ("dpmsolver", "dpmsolver++"):
        title = {"dpmsolver": "DPM-Solver", "dpmsolver++": "DPM-Solver++"}[algorithm]
        for method in ("multistep", "singlestep"):
            for order in (1, 2, 3):
                config = {**DPM, "algorithm_type": algorithm, "method": method, "order": order}
                found[f"{title} {order}, {method}"] = Case(config, order, fine)
                if order == 2 or (order == 3 and method == "singlestep"):
                    found[f"{title} {order}, {method}, taylor"] = Case({**config, "solver_type": "taylor"}, order, fine)
    return found


DDIM: dict[str, Any] = {"type": "iddpm", "sampler": "ddim", "variance": "fixed_small"}


def errors(case: Case, steps: Sequence[int]) -> list[float]:
    """RMS distance of the sampler's points from the exact solution's, for each number of steps."""
    exact = solution(tuple(case.reference.items()))
    found = [solution(tuple({**case.sampler, "num_sampling_steps": n}.items())) for n in steps]
    return [float((x - exact).square().mean().sqrt()) for x in found]


def measured_order(steps: Sequence[int], error: Sequence[float]) -> float:
    """From the last two numbers of steps."""
    return math.log(error[-2] / error[-1]) / math.log(steps[-1] / steps[-2])


@cache
def solution(config: tuple[tuple[str, Any], ...]) -> Tensor:
    """Where the sampler takes 256 fixed points of noise: [1, 2, 1, 256, 1] fp64."""
    settings = dict(config)
    z = torch.randn(1, 2, 1, 256, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return SCHEDULERS.build(settings).sample(model_of(settings["type"]), z, {})


def model_of(scheduler: str) -> Callable[..., Tensor]:
    """The exact denoiser, in the form that the scheduler samples."""
    if scheduler == "rflow":
        return MIXTURE.denoiser("velocity", rectified_flow())
    return MIXTURE.denoiser("eps", variance_preserving(named_schedule("linear", 1000).table["alphas_cumprod"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="multiples of 6, each twice the one before")
    parser.add_argument("--plot", type=Path, help="draw the errors to this file")
    args = parser.parse_args()
    found = {name: (case, errors(case, args.steps)) for name, case in cases().items()}
    print(f"| sampler | error at {args.steps[-1]} steps | theory | measured order |")
    print("|---|---|---|---|")
    for name, (case, error) in found.items():
        print(f"| {name} | {error[-1]:.1e} | {case.order} | {measured_order(args.steps, error):.2f} |")
    if args.plot:
        draw(found, args.steps, args.plot)


def draw(found: dict[str, tuple[Case, list[float]]], steps: Sequence[int], path: Path) -> None:
    """One panel for each order in theory, with a line of that slope."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), sharey=True, layout="constrained")
    for order, axis in enumerate(axes, start=1):
        of_order = {name: error for name, (case, error) in found.items() if case.order == order}
        for i, (name, error) in enumerate(of_order.items()):
            axis.loglog(steps, error, marker="osv^D<>"[i % 7], markersize=4, linewidth=1, label=name)
        start = 2 * max(error[0] for error in of_order.values())
        axis.loglog(
            steps, [start * (n / steps[0]) ** -order for n in steps], "k--", linewidth=1, label=f"slope -{order}"
        )
        axis.set_title(f"order {order}")
        axis.set_xticks(steps, [str(n) for n in steps], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("calls of the model")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("RMS error")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
