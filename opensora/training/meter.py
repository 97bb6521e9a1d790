"""What a training run measures of itself: loss, speed, waiting for data, MFU, memory, and the same by bucket.

Only `read`, once for a line of the log, waits for the device: losses stay there until then, GPUs are timed by events, and
all processes exchange their figures at once. docs/reference/log.md explains each figure.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.training.flops import FORWARDS_IN_A_STEP, Peak

T = TypeVar("T")
Size = tuple[int, int, int]  # frames, height, width
LOSS, SAMPLES, BATCHES, SECONDS = range(4)  # rows of a table of buckets


class MeteredModel(Protocol):
    """What is asked of a denoiser."""

    def flops(self, latent_size: Size, text_len: int) -> int: ...

    def grid(self, latent_size: Sequence[int]) -> Size: ...


class Step(NamedTuple):
    """An optimizer step, of all processes."""

    number: int  # counted from 1
    loss: float  # mean over its batches
    grad_norm: float  # before clipping

    @property
    def is_finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)


class Reading(NamedTuple):
    """What happened since the reading before."""

    steps: tuple[Step, ...]  # also those that are not finite
    figures: dict[str, float]  # for the log
    buckets: dict[str, dict[str, float]]  # name -> figures; empty where the data have one size


class StepMeter:
    """Loss, gradient norm and speed of a training loop."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._steps: list[tuple[int, Tensor, Tensor]] = []  # number, loss, gradient norm
        self._losses: list[Tensor] = []  # of the micro-batches of the running step
        self._samples = 0
        self._since: float | None = None  # when the reading before was

    def count(self, loss: Tensor, samples: int) -> None:
        """Count a micro-batch: its mean loss [], and its samples on all processes."""
        self._losses.append(loss.detach())
        self._samples += samples

    def step(self, number: int, grad_norm: Tensor) -> None:
        """Step `number`, counted from 1, is done."""
        self._steps.append((number, torch.stack(self._losses).double().mean(), grad_norm.detach().double()))
        self._losses = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what is no training, such as a validation: its time is left out of the speed."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.perf_counter() - begin

    def read(self) -> Reading:
        """The figures since the reading before; all processes call it after the same step. Waits for the device."""
        nothing = torch.zeros(0, dtype=torch.float64, device=self.world.device)
        steps, figures, _, _, _ = self._read(nothing, nothing)
        return Reading(steps, figures, {})

    def _read(
        self, sums: Tensor, maxima: Tensor
    ) -> tuple[tuple[Step, ...], dict[str, float], float | None, list[float], list[float]]:
        """Steps, figures, seconds since the reading before (None in the first), and `sums` and `maxima` over all processes."""
        numbers, losses, norms = zip(*self._steps, strict=True)
        n, device, samples = len(numbers), sums.device, self._samples
        self._steps, self._samples = [], 0
        sums = torch.cat([torch.stack(losses).to(device), sums])
        if self.world.size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        sums[:n] /= self.world.size
        values = torch.cat([sums, torch.stack([norm.to(device) for norm in norms]), maxima]).tolist()
        k = len(sums)
        steps = tuple(Step(*step) for step in zip(numbers, values[:n], values[k : k + n], strict=True))
        finite = [step for step in steps if step.is_finite] or steps
        figures = {"loss": sum(step.loss for step in finite) / len(finite), "grad_norm": finite[-1].grad_norm}
        now = time.perf_counter()
        seconds = None if self._since is None else now - self._since
        self._since = now
        if seconds is not None:  # the first window has compilation, caches and workers that begin
            figures |= {"samples_per_s": samples / seconds, "s_per_step": seconds / n}
        return steps, figures, seconds, values[n:k], values[k + n :]


class Meter(StepMeter):
    """Measures the training loop of a denoiser.

    Args:
        world: this process and the others.
        model: counts its own operations and tokens.
        peak: of one device, for MFU; None leaves MFU out.
        sizes: (frames, height, width) of the data's buckets, in the same order in all processes; none where the data have
            one size.
        epoch: in which the run begins.
    """

    def __init__(
        self, world: World, model: MeteredModel, *, peak: Peak | None = None, sizes: Sequence[Size] = (), epoch: int = 0
    ) -> None:
        super().__init__(world)
        self.model, self.peak = model, peak
        self.sizes = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
        self._buckets = torch.zeros(
            2, max(len(self.sizes), 1), dtype=torch.float64, device=world.device
        )  # loss, samples
        self._spans: list[tuple[int, Any, Any]] = []  # (bucket, begin, end) of each batch
        self._begin: Any = None  # of the running batch
        self._costs: dict[tuple[Size, int], tuple[int, int]] = {}
        self._tokens = self._flops = 0
        self._waited_s = 0.0
        self._retries = memory_use(world.device)[1]
        self._epoch_number, self._epoch_steps = epoch, (0, 0)  # the first and the last that were read
        self._epoch = torch.zeros(4, self._buckets.shape[1], dtype=torch.float64)

    def data_wait(self, batches: Iterable[T]) -> Iterator[T]:
        """The same items; how long each took to come is counted."""
        iterator, end = iter(batches), object()
        while True:
            begin = time.perf_counter()
            item: Any = next(iterator, end)
            self._waited_s += time.perf_counter() - begin
            if item is end:
                return
            self._begin = self._now()
            yield item

    def add(self, batch: Mapping[str, Any], z: Tensor, cond: Mapping[str, Tensor], loss: Tensor) -> None:
        """Count a micro-batch whose backward pass is under way.

        Args:
            batch: of the loader.
            z: its latents [B, C, T, h, w].
            cond: with the text `y` [B, 1, L, D].
            loss: [], its mean.
        """
        self.count(loss, batch["global_batch_size"])
        latent_size, text_len = (z.shape[2], z.shape[3], z.shape[4]), cond["y"].shape[2]
        if (latent_size, text_len) not in self._costs:
            flops = FORWARDS_IN_A_STEP * self.model.flops(latent_size, text_len)
            self._costs[latent_size, text_len] = prod(self.model.grid(latent_size)), flops
        tokens, flops = self._costs[latent_size, text_len]
        self._tokens += len(z) * tokens
        self._flops += len(z) * flops
        bucket = 0
        if len(self.sizes) > 1:
            frames, height, width = (int(batch[name][0]) for name in ("num_frames", "height", "width"))
            bucket = self.sizes[frames, height, width]
        loss = loss.detach()
        finite = torch.isfinite(loss)
        self._buckets[LOSS, bucket] += torch.where(finite, loss * len(z), 0.0)
        self._buckets[SAMPLES, bucket] += finite * len(z)
        begin, self._begin = self._begin, self._now()
        self._spans.append((bucket, begin, self._begin))

    def read(self) -> Reading:
        """See `StepMeter.read`."""
        device = self.world.device
        own = torch.tensor([self._tokens, self._flops], dtype=torch.float64, device=device)
        peak_bytes, retries = memory_use(device)
        memory = torch.tensor([peak_bytes, retries - self._retries], dtype=torch.float64, device=device)
        steps, figures, seconds, sums, most = self._read(torch.cat([self._buckets.flatten(), own]), memory)
        # processes of one sample (sequence parallelism) have counted it once each
        *buckets, tokens, flops = (value / self.world.sp_size for value in sums)
        if seconds is not None:
            figures |= {"tokens_per_s": tokens / seconds, "data_wait": self._waited_s / seconds}
            if self.peak is not None:
                figures["mfu"] = flops / seconds / (self.peak.tflops * 1e12 * self.world.size)
        if most[0]:
            figures["peak_gib"] = most[0] / 2**30
        if most[1]:
            figures["alloc_retries"] = most[1]

        totals = torch.zeros_like(self._epoch)
        totals[:2] = torch.tensor(buckets).view(2, -1)
        for bucket, begin, end in self._spans:
            totals[BATCHES, bucket] += 1
            totals[SECONDS, bucket] += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        self._epoch += totals
        self._epoch_steps = self._epoch_steps[0] or steps[0].number, steps[-1].number
        named: dict[str, dict[str, float]] = {}
        for size, (loss, samples, batches, took) in zip(self.sizes, totals.T.tolist(), strict=False):
            if samples and len(self.sizes) > 1:
                named["x".join(map(str, size))] = {"loss": loss / samples, "samples": samples} | (
                    {"s_per_batch": took / batches} if batches else {}
                )
        self._buckets.zero_()
        self._spans, self._tokens, self._flops, self._waited_s, self._retries = [], 0, 0, 0.0, retries
        return Reading(steps, figures, named)

    def epoch_table(self, epoch: int) -> str:
        """Once `epoch` is another than in the call before: the table of all buckets since then, or a line where there are none; else nothing.

        Without buckets there is nothing either where several epochs passed, as of a few clips: they would fill the log.
        It is as of the last reading, so that a few steps of the new epoch may be in it.
        """
        before, self._epoch_number = self._epoch_number, epoch
        first, last = self._epoch_steps
        if before == epoch or not first:
            return ""
        lines = [f"epoch {before}, steps {first} to {last}:"]
        names = ["x".join(map(str, size)) for size in self.sizes]
        if names:
            lines.append(f"  {'bucket':<18} {'samples':>9} {'loss':>9} {'s/batch':>9}")
        for name, (loss, samples, batches, took) in zip(names or ["all"], self._epoch.T.tolist(), strict=True):
            if samples:
                s_per_batch = f"{took / batches:.3f}" if batches else "-"
                if names:
                    lines.append(f"  {name:<18} {samples:>9.0f} {loss / samples:>9.4f} {s_per_batch:>9}")
                else:
                    lines[0] += f" {samples:.0f} samples, loss {loss / samples:.4f}, {s_per_batch} s/batch"
        self._epoch_steps = 0, 0
        self._epoch.zero_()
        return "\n".join(lines) if names or epoch == before + 1 else ""

    def _now(self) -> Any:
        """This moment, as the device sees it."""
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def memory_use(device: torch.device) -> tuple[int, int]:
    """The most bytes that tensors took on a GPU since the start, and how often PyTorch ran out of memory and freed its cache."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
