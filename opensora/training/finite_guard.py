"""What happens to a step whose loss or gradient is not finite: it is not taken, and the run stops or counts it.

An engine drops a step whose gradient norm is not finite, in all processes alike and without waiting for the device (see
`Engine.step`). Here a loss that is not finite always makes the gradient NaN, in one process and so, by the sum of gradients,
in all; and the next line of the log, which is never after a checkpoint, names the files of such a step and does what the
config's `on_nonfinite` says.
"""

import logging
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.training.meter import Reading
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Policy = Literal["stop", "skip"]
SHOWN_FILES = 8  # of each process
MOST_OVERFLOWS = 100
"""fp16 steps in a row that overflow. The loss scale has gone from 2^16 to 2^-84 then, and is not what is wrong."""


class FiniteGuard:
    """Watches the losses and gradients of a training loop.

    Args:
        policy: "stop" ends the run at the next line of the log; "skip" continues without the step.
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
        self._seen: list[tuple[Tensor, list[str]]] = []  # loss and files of each micro-batch since the last reading
        self._without_discriminator: set[int] = set()  # numbers of steps

    def __call__(self, loss: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Note a micro-batch's loss []; what to differentiate in its place, the same number with the same gradient.

        Where it is not finite, the gradient of every weight is NaN, even if by itself it would not be.
        """
        self._seen.append((loss.detach(), [str(path) for path in batch["path"]]))
        return loss * (loss.detach() * 0 + 1)

    def taken(self, grad_norm: Tensor) -> bool:
        """Whether the step with this gradient norm was taken, as far as the EMA weights are concerned.

        With "skip" this waits for the device. With "stop" nothing that a dropped step leaves behind is ever saved.
        """
        return self.policy == "stop" or bool(torch.isfinite(grad_norm))

    def note_discriminator(self, number: int, grad_norm: Tensor, *, taken: bool) -> None:
        """Note whether step `number`, counted from 1, was `taken` by the generator alone.

        `grad_norm` is not finite where that of the discriminator is not.
        """
        if taken and not self.taken(grad_norm):
            self._without_discriminator.add(number)

    def checked(self, reading: Reading) -> dict[str, Any]:
        """The reading's figures for the log, if training may continue; all processes call it after the same step.

        Raises:
            UserError: a loss or gradient is not finite, and the policy says to stop.
        """
        seen, self._seen = self._seen, []
        steps, per_step = reading.steps, len(seen) // len(reading.steps)  # micro-batches of a step
        bad = [i for i, s in enumerate(steps) if not (isfinite(s.loss) if self.scales_loss else s.is_finite)]
        if bad:
            self.skipped += len(bad)
            own = [[(float(loss), files) for loss, files in seen[i * per_step : (i + 1) * per_step]] for i in bad]
            everyone: list[Any] = [own]
            if self.world.size > 1:
                everyone = [None] * self.world.size
                dist.all_gather_object(everyone, own)
            lines = []
            for k, step in enumerate(steps[i] for i in bad):
                by = " by the discriminator" if step.number in self._without_discriminator else ""
                lines.append(
                    f"step {step.number} was not taken{by}: its loss is {step.loss:g}, its gradient norm "
                    f"{step.grad_norm:g}. {_name_files([batches[k] for batches in everyone])}"
                )
            self._report("\n".join(lines))
        if self.scales_loss:
            for step in steps:
                self.overflows_in_a_row = 0 if isfinite(step.grad_norm) else self.overflows_in_a_row + 1
            if self.overflows_in_a_row >= MOST_OVERFLOWS:
                raise UserError(
                    f"the gradient overflowed in {self.overflows_in_a_row} steps in a row, whatever the loss scale: this "
                    "model cannot be trained in fp16. Use --dtype bf16."
                )
        figures: dict[str, Any] = dict(reading.figures)
        if self.skipped:
            figures["skipped_steps"] = self.skipped
        return figures | ({"buckets": reading.buckets} if reading.buckets else {})

    def _report(self, message: str) -> None:
        remedy = "Look at the files; a lower --lr or --dtype fp32 helps where they are sound."
        if self.policy == "stop":
            raise UserError(
                f"{message}\nNothing is saved after the last checkpoint; resume it with --load. {remedy} --on-nonfinite skip "
                "continues without such steps."
            )
        if self.skipped > self.max_skipped:
            raise UserError(
                f"{message}\nThese are {self.skipped} skipped steps, more than max_skipped={self.max_skipped}. {remedy}"
            )
        if self.world.is_main:
            logger.warning("%s", message)


def _name_files(of_ranks: Sequence[Sequence[tuple[float, list[str]]]]) -> str:
    """The files of batches whose loss is not finite; of all batches, where all losses are finite."""
    only_bad = any(not isfinite(loss) for batches in of_ranks for loss, _ in batches)
    lines = []
    for rank, batches in enumerate(of_ranks):
        files = sorted({path for loss, paths in batches for path in paths if not (only_bad and isfinite(loss))})
        if files:
            more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
            lines.append(f"process {rank} had {', '.join(files[:SHOWN_FILES])}{more}")
    return "; ".join(lines)
