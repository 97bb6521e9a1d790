"""What happens to a step whose loss or gradient is no number: it is never taken, and the run stops or counts it.

An engine drops a step whose gradient norm is not finite, in all processes alike and without waiting for the device (see
`Engine.step`). Two things are added here: a loss that is no number always makes the gradient none, in one process and so,
by the sum of gradients, in all; and the next line of the log names the files of such a step and does what the config's
`on_nonfinite` says. No checkpoint is written before that.
"""

import logging
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.training.meter import Reading, Step
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Policy = Literal["stop", "skip"]
SHOWN_FILES = 8  # of each process
MOST_OVERFLOWS = 100
"""fp16 steps in a row that overflow. The loss scale has gone from 2^16 to 2^-84 then, and is not what is wrong."""


class _Noted(NamedTuple):
    """A micro-batch of this process."""

    loss: Tensor
    files: list[str]


class FiniteGuard:
    """Watches the losses and gradients of a training loop.

    Args:
        world: this process and the others.
        policy: "stop" ends the run at the next line of the log; "skip" goes on without the step.
        max_skipped: with "skip", the number of such steps, counted from the start of this process, above which it ends.
        scales_loss: whether the engine scales the loss (fp16): a finite loss with a gradient that overflows then only
            halves the scale.
    """

    def __init__(
        self, world: World, policy: Policy = "stop", max_skipped: int = 10, *, scales_loss: bool = False
    ) -> None:
        self.world, self.policy, self.max_skipped, self.scales_loss = world, policy, max_skipped, scales_loss
        self.skipped = 0
        self.overflows_in_a_row = 0
        self._noted: list[_Noted] = []
        self._partly: dict[int, str] = {}  # step -> what was left as it was

    def __call__(self, loss: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Note a micro-batch's loss []; what to differentiate in its place, the same number with the same gradient.

        Where it is not finite, the gradient of every weight is NaN, even if by itself it would not be.
        """
        self._noted.append(_Noted(loss.detach(), [str(path) for path in batch["path"]]))
        return loss * (loss.detach() * 0 + 1)

    def taken(self, grad_norm: Tensor) -> bool:
        """Whether the step with this gradient norm was taken, as far as the averaged weights are concerned.

        With "skip" this waits for the device. With "stop" nothing that a dropped step leaves behind is ever saved.
        """
        return self.policy == "stop" or bool(torch.isfinite(grad_norm))

    def but_for(self, what: str, number: int, grad_norm: Tensor, *, taken: bool) -> None:
        """Note whether step `number`, counted from 1, was `taken` but for `what`, with which the gradient norm is no number."""
        if taken and not self.taken(grad_norm):
            self._partly[number] = what

    def checked(self, reading: Reading) -> dict[str, Any]:
        """The reading's figures for the log, if training may go on; all processes call it after the same step.

        Raises:
            UserError: a loss or gradient is no number, and the policy says to stop.
        """
        noted, self._noted = self._noted, []
        bad = [i for i, step in enumerate(reading.steps) if self._is_bad(step)]
        if bad:
            self.skipped += len(bad)
            self._decide(reading.steps, bad, self._where(noted, bad, len(noted) // len(reading.steps)))
        self._count_overflows(reading.steps)
        figures: dict[str, Any] = dict(reading.figures)
        if self.skipped:
            figures["skipped_steps"] = self.skipped
        return figures | ({"buckets": reading.buckets} if reading.buckets else {})

    def _is_bad(self, step: Step) -> bool:
        return not (isfinite(step.loss) if self.scales_loss else step.is_finite)

    def _decide(self, steps: Sequence[Step], bad: Sequence[int], where: Sequence[str]) -> None:
        told = "\n".join(
            f"step {steps[i].number} was not taken{self._but(steps[i].number)}: its loss is {steps[i].loss:g}, its gradient norm "
            f"{steps[i].grad_norm:g}. {files}"
            for i, files in zip(bad, where, strict=True)
        )
        if self.policy == "stop":
            raise UserError(
                f"{told}\nNothing is saved after the last checkpoint; go on from it with --load. Look at the files; a lower "
                "--lr or --dtype fp32 helps where they are sound. --on-nonfinite skip goes on without such steps."
            )
        if self.skipped > self.max_skipped:
            raise UserError(
                f"{told}\nThese are {self.skipped} skipped steps, more than max_skipped={self.max_skipped}. Look at the "
                "files; a lower --lr or --dtype fp32 helps where they are sound."
            )
        if self.world.is_main:
            logger.warning("%s", told)

    def _but(self, number: int) -> str:
        what = self._partly.pop(number, None)
        return "" if what is None else f" by {what}"

    def _where(self, noted: Sequence[_Noted], bad: Sequence[int], micro_batches: int) -> list[str]:
        """For each bad step the files of its bad batches, of all processes."""
        own = [
            [(float(loss), files) for loss, files in noted[i * micro_batches : (i + 1) * micro_batches]] for i in bad
        ]
        everyone: list[Any] = [own]
        if self.world.size > 1:
            everyone = [None] * self.world.size
            dist.all_gather_object(everyone, own)
        return [_name_files([steps[k] for steps in everyone]) for k in range(len(bad))]

    def _count_overflows(self, steps: Sequence[Step]) -> None:
        if not self.scales_loss:
            return
        for step in steps:
            self.overflows_in_a_row = 0 if isfinite(step.grad_norm) else self.overflows_in_a_row + 1
        if self.overflows_in_a_row >= MOST_OVERFLOWS:
            raise UserError(
                f"the gradient overflowed in {self.overflows_in_a_row} steps in a row, whatever the loss scale: this model "
                "cannot be trained in fp16. Use --dtype bf16."
            )


def _name_files(of_ranks: Sequence[Sequence[tuple[float, list[str]]]]) -> str:
    """The files of batches whose loss is no number; of all batches, where the losses are numbers."""
    lines = []
    for only_bad in (True, False):
        for rank, batches in enumerate(of_ranks):
            files = sorted({path for loss, paths in batches for path in paths if not (only_bad and isfinite(loss))})
            if files:
                more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
                lines.append(f"process {rank} had {', '.join(files[:SHOWN_FILES])}{more}")
        if lines:
            break
    return "; ".join(lines)
