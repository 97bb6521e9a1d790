"""The one loop of all samplers: guidance, frame masks, number format, progress. An algorithm supplies a `Solver`.

The loop never waits for the device: whatever depends on a step is a Python number known before sampling starts, which
reaches the device as an argument of a kernel, and masks act through `torch.where`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from opensora.schedulers.frame_mask import FrameMask, per_frame
from opensora.schedulers.guidance import Condition, Denoiser, Guidance, Joined
from opensora.schedulers.training import at_least_fp32, predict
from opensora.utils.errors import UserError

Time = int | float
Denoise = Callable[[Tensor, Time], Tensor]  # (x, timestep) -> the model's output, guided, [B, C or 2C, T, H, W]


class SamplingStep(NamedTuple):
    """What a caller sees after each step."""

    index: int  # type: ignore[assignment]  # 0 is the first step, num_steps - 1 the last; hides tuple.index
    num_steps: int
    timestep: Tensor  # [B]: what the model was told
    x: Tensor  # [B, C, T, H, W] after the step
    x_0: Tensor  # the prediction of the end, for previews


class Solver(Protocol):
    """How one algorithm moves x. Made anew for each sampling run, so that it may keep a history."""

    @property
    def timesteps(self) -> Sequence[Time]:
        """Of each step, falling: integers of a discrete training, or floats."""
        ...

    @property
    def levels(self) -> Sequence[float]:
        """Of each step, falling in (0, 1]: the noise in x as a part of the training time."""
        ...

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        """The forward process: x_0 at the level before step `index`."""
        ...

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x after the step, and the predicted x_0.

        `active` [B, T] bool says which frames move: whatever is returned for the others is dropped. None: all.
        """
        ...


class Sampler(ABC):
    """The sampling half of a scheduler."""

    guidance: Guidance

    @abstractmethod
    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """The solver of one run; raises a ValueError when it draws noise and there are no generators."""

    @property
    @abstractmethod
    def num_sampling_steps(self) -> int:
        """Steps of a run."""

    @property
    def cfg_scale(self) -> float:
        """The guidance scale where `sample` is given none."""
        return self.guidance.scale

    @property
    def cfg_channel(self) -> int | None:
        """How many channels are guided; None: all."""
        return self.guidance.channels

    def state_dict(self) -> dict[str, Tensor]:
        """What a resume of training needs; nothing where a scheduler learns nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave; a UserError when it is another scheduler's."""
        if state:
            raise UserError(
                f"the checkpoint's scheduler learnt something ({', '.join(sorted(state))}), {type(self).__name__} does not: it is "
                "another scheduler's."
            )

    def sample(
        self,
        model: Denoiser,
        z: Tensor,
        cond: Condition,
        *,
        null: Condition | None = None,
        mask: Tensor | None = None,
        guidance_scale: float | None = None,
        generators: Sequence[torch.Generator] | None = None,
        progress: bool = False,
    ) -> Tensor:
        """x_0 [B, C, T, H, W], fp32, from the initial noise z of that shape: the end of `sample_steps`."""
        steps = self.sample_steps(
            model, z, cond, null=null, mask=mask, guidance_scale=guidance_scale, generators=generators
        )
        x = z
        for step in tqdm(steps, total=self.num_sampling_steps, disable=not progress):
            x = step.x
        return x

    def sample_steps(
        self,
        model: Denoiser,
        z: Tensor,
        cond: Condition,
        *,
        null: Condition | None = None,
        mask: Tensor | None = None,
        guidance_scale: float | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Iterator[SamplingStep]:
        """The steps one by one, each computed when asked for: show progress, preview `x_0`, stop early.

        Args:
            model: called as `model(x, timestep, **cond)`, with `x_mask=` [B, T] when there is a mask.
            z: [B, C, T, H, W] noise; fp64 is sampled in fp64, everything else in fp32.
            cond, null: the condition, and the entries of it that differ for the unconditional pass (a negative prompt
                is such a `y` with its own `mask`); without `null` or with a scale of 1 there is no guidance.
            mask: [B, T]; 1 or True generates a frame from the noise in z. At 0 or False z holds a given frame, which
                comes back bit for bit. Between them z holds a reference that is edited from that noise level on.
            guidance_scale: overrides `cfg_scale`.
            generators: one per sample, for the noise of the steps and of edits; a deterministic sampler needs none.

        Raises:
            UserError: there is a scale, and no step at which it has an effect.
        """
        x = at_least_fp32(z)
        solver = self.solver(x, generators)
        guidance = self.guidance if guidance_scale is None else self.guidance._replace(scale=guidance_scale)
        if null is not None:
            guidance.refuse_idle(solver.levels)
        frames = None if mask is None else FrameMask(mask, solver.levels, x, generators, solver.noised)
        return _steps(solver, guidance, model, x, cond, null, frames)


@torch.no_grad()
def _steps(
    solver: Solver,
    guidance: Guidance,
    model: Denoiser,
    x: Tensor,
    cond: Condition,
    null: Condition | None,
    frames: FrameMask | None,
) -> Iterator[SamplingStep]:
    joined: Joined = {}
    num_steps = len(solver.timesteps)
    for index in range(num_steps):
        active = moves = None
        if frames is not None:
            x, active = frames.noise_entering(x, index), frames.active(index)
            moves = None if frames.all_move[index] else per_frame(active)
        guided = guidance.wrap(model, null, index, solver.levels[index], joined)
        told = timestep_of(solver.timesteps[index], x)
        # frames that all move from the first step on have one history: a solver need not tell them apart
        moving = None if frames is None or frames.all_move[0] else active
        after, x_0 = solver.step(
            _denoise(guided, cond, x, (active, moves), (solver.timesteps[index], told)), x, index, moving
        )
        if moves is not None:
            after, x_0 = torch.where(moves, after, x), torch.where(moves, x_0, x)
        x = after
        yield SamplingStep(index, num_steps, told, x, x_0)


def _denoise(
    model: Denoiser,
    cond: Condition,
    start: Tensor,
    active: tuple[Tensor | None, Tensor | None],
    told: tuple[Time, Tensor],
) -> Denoise:
    """The model within a step from `start`; it sees the frames that do not move as they are there, bit for bit.

    Args:
        active: what the model is told, and the same [B, 1, T, 1, 1] where not all frames move.
        told: the step's own timestep, as a number and as a tensor.
    """

    def denoise(x: Tensor, timestep: Time) -> Tensor:
        if active[1] is not None and x is not start:
            x = torch.where(active[1], x, start)
        return predict(model, x, told[1] if timestep is told[0] else timestep_of(timestep, x), cond, active[0])

    return denoise


def timestep_of(timestep: Time, x: Tensor) -> Tensor:
    """[B]: int64, or x's format, never less than fp32."""
    dtype = torch.int64 if isinstance(timestep, int) else x.dtype
    return torch.full((len(x),), timestep, device=x.device, dtype=dtype)
