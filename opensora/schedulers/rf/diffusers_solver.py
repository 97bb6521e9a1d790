"""Multistep solvers of a flow's ODE, and diffusers' Euler: its own schedulers, as released models of today are sampled."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.schedulers.sampling import Denoise, Time
from opensora.schedulers.training import without_variance


class FlowSolver(NamedTuple):
    """A scheduler of diffusers: its class, what it calls the shift, and further arguments."""

    name: str
    shift: str
    options: dict[str, Any]


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
FLOW_SOLVERS = {
    # UniPC (Zhao et al. 2023, arXiv:2302.04867) and DPM-Solver++ (Lu et al. 2022, arXiv:2211.01095), of order 2
    "unipc": FlowSolver("UniPCMultistepScheduler", "flow_shift", FLOW),
    "dpm++": FlowSolver("DPMSolverMultistepScheduler", "flow_shift", FLOW),
    "flow-euler": FlowSolver("FlowMatchEulerDiscreteScheduler", "shift", {}),
}


class DiffusersRun:
    """One run of a solver, see `opensora.schedulers.sampling.Solver`.

    Args:
        name: one of `FLOW_SOLVERS`.
        num_steps: of sampling.
        num_timesteps: T of the training.
        shift: see `opensora.schedulers.rf.rectified_flow.shift_ratio`.
    """

    def __init__(self, name: str, num_steps: int, num_timesteps: int, shift: float) -> None:
        import diffusers

        kind, shift_name, options = FLOW_SOLVERS[name]
        self.solver: Any = getattr(diffusers, kind)(num_train_timesteps=num_timesteps, **{shift_name: shift}, **options)
        self.solver.set_timesteps(num_steps)
        self.solver.set_begin_index(0)
        self.timesteps: list[Time] = self.solver.timesteps.tolist()
        self.levels: list[float] = self.solver.sigmas.tolist()[:-1]

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        tau = self.levels[index]
        return (1 - tau) * x_0 + tau * noise

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x at the next time, and x_0 as predicted at the start of the step."""
        v = without_variance(denoise(x, self.timesteps[index]), x.shape[1])
        after = self.solver.step(-v, self.solver.timesteps[index], x, return_dict=False)[0]
        return after, torch.add(x, v, alpha=self.levels[index])
