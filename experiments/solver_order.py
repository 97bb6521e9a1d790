"""The order of every deterministic sampler: how fast its error falls with the number of steps.

    python -m experiments.solver_order [--steps 24 48 96 192 384] [--plot docs/images/solver_order.png]

The model is the exact denoiser of a Gaussian mixture in the plane (experiments/toy_mixture.py), all in fp64. A sampler of
order p has an error of O(N^-p) in N steps against the exact solution of the ODE, for which a fine solver stands (third order and
2000 steps; midpoint for the rectified flow).
Prints a markdown table: the error at the most steps, and the order, from the last doubling of the steps.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.toy_mixture import GaussianMixture, LevelOf, rectified_flow, variance_preserving
from opensora.registry import SCHEDULERS
from opensora.schedulers.noise_schedule import named_schedule
from opensora.utils.errors import exit_on_user_error
from tools.command import Parser

STEPS = (24, 48, 96, 192, 384)
MIXTURE = GaussianMixture(num_modes=3, radius=1.0, std=0.5)  # smooth, so that few steps show the asymptotic order
DDIM: dict[str, Any] = {"type": "iddpm", "sampler": "ddim", "variance": "fixed_small"}
DPM: dict[str, Any] = {"type": "dpm-solver", "skip_type": "logSNR", "lower_order_final": "never"}


class Case(NamedTuple):
    """A sampler, the order that its theory states, and a fine sampler of the same ODE, from the same to the same level."""

    sampler: dict[str, Any]
    order: int
    reference: dict[str, Any]


def cases() -> dict[str, Case]:
    """By name."""
    fine = {**DPM, "order": 3, "num_sampling_steps": 2000}
    found = {"DDIM": Case(DDIM, 1, {**fine, "final": "denoise_to_zero"})}
    for sampler, order in (("euler", 1), ("midpoint", 2), ("heun", 2)):
        flow = {"type": "rflow", "sampler": sampler}
        found[f"Rectified flow, {sampler}"] = Case(
            flow, order, {**flow, "sampler": "midpoint", "num_sampling_steps": 2000}
        )
    for algorithm in ("dpmsolver", "dpmsolver++"):
        title = {"dpmsolver": "DPM-Solver", "dpmsolver++": "DPM-Solver++"}[algorithm]
        for method in ("multistep", "singlestep"):
            for order in (1, 2, 3):
                config = {**DPM, "algorithm_type": algorithm, "method": method, "order": order}
                found[f"{title} {order}, {method}"] = Case(config, order, fine)
                if order == 2 or (order == 3 and method == "singlestep"):
                    found[f"{title} {order}, {method}, taylor"] = Case({**config, "solver_type": "taylor"}, order, fine)
    return found


def errors(case: Case, steps: Sequence[int]) -> list[float]:
    """RMS distance of the sampler's points from the exact solution's, for each number of steps."""
    exact = solution(tuple(case.reference.items()))
    found = [solution(tuple({**case.sampler, "num_sampling_steps": n}.items())) for n in steps]
    return [float((x - exact).square().mean().sqrt()) for x in found]


def errors_of_diffusers(steps: Sequence[int]) -> list[float]:
    """The same for the third-order DPM-Solver++ of diffusers, on the same levels, in fp64 and without its `step`'s fp32."""
    from diffusers import DPMSolverMultistepScheduler

    exact = solution(tuple({**DPM, "order": 3, "num_sampling_steps": 2000}.items()))
    found = []
    for num_steps in steps:
        theirs: Any = DPMSolverMultistepScheduler(solver_order=3)
        levels = [step.level for step in SCHEDULERS.build({**DPM, "num_sampling_steps": num_steps}).plan]
        levels = [*levels, SCHEDULERS.build({**DPM, "final": "denoise_to_zero"}).plan[-1].level]
        theirs.sigmas = torch.tensor([level.sigma / level.alpha for level in levels], dtype=torch.float64)
        x, outputs = noise(), []
        for i, level in enumerate(levels[:-1]):
            theirs._step_index = i
            alpha, sigma = (torch.tensor([value], dtype=torch.float64) for value in (level.alpha, level.sigma))
            outputs.append(MIXTURE.x_0_and_eps(x, alpha, sigma)[0])
            if i == 0:
                x = theirs.dpm_solver_first_order_update(outputs[-1], sample=x)
            elif i == 1:
                x = theirs.multistep_dpm_solver_second_order_update(outputs, sample=x)
            else:
                x = theirs.multistep_dpm_solver_third_order_update(outputs, sample=x)
        found.append(float((x - exact).square().mean().sqrt()))
    return found


def measured_order(steps: Sequence[int], error: Sequence[float]) -> float:
    """From the last two numbers of steps."""
    return math.log(error[-2] / error[-1]) / math.log(steps[-1] / steps[-2])


@cache
def solution(config: tuple[tuple[str, Any], ...]) -> Tensor:
    """Where the sampler takes the fixed points of noise."""
    settings = dict(config)
    return SCHEDULERS.build(settings).sample(MIXTURE.denoiser(form_of(settings), level_law(settings)), noise(), {})


def noise() -> Tensor:
    """128 points: [1, 2, 1, 128, 1] fp64."""
    return torch.randn(1, 2, 1, 128, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def form_of(config: dict[str, Any]) -> str:
    """What a model for this scheduler predicts."""
    return "velocity" if config["type"] == "rflow" else config.get("prediction", "eps")


def level_law(config: dict[str, Any]) -> LevelOf:
    """How a scheduler's timesteps translate to alpha and sigma."""
    if config["type"] == "rflow":
        return rectified_flow()
    schedule = named_schedule(config.get("noise_schedule", "linear"), 1000)
    return variance_preserving(schedule.table["alphas_cumprod"])


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="multiples of 6, each twice the one before")
    parser.add_argument("--plot", type=Path, help="draw the errors to this file")
    args = parser.parse_args()
    found = {name: (case, errors(case, args.steps)) for name, case in cases().items()}
    print(f"| sampler | error at {args.steps[-1]} steps | theory | measured order |")
    print("|---|---|---|---|")
    for name, (case, error) in found.items():
        print(f"| {name} | {error[-1]:.1e} | {case.order} | {measured_order(args.steps, error):.2f} |")
    theirs = errors_of_diffusers(args.steps)
    order = measured_order(args.steps, theirs)
    print(f"| diffusers' DPM-Solver++ 3, multistep | {theirs[-1]:.1e} | 3 | {order:.2f} |")
    if args.plot:
        draw(found, args.steps, args.plot)


def draw(found: dict[str, tuple[Case, list[float]]], steps: Sequence[int], path: Path) -> None:
    """One panel for each order in theory, with a line of that slope."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 6.2), sharey=True, layout="constrained")
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
        axis.set_xlabel("steps")
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("RMS error")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
