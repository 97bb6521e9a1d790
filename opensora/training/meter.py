"""What a training run measures of itself: loss, speed, waiting for data, MFU, memory, and the same by bucket.

Nothing here waits for the device but `read`, once for a line of the log: losses stay where they are until then, GPUs are
timed by events, and the figures of all processes come together in one exchange. docs/training-log.md explains each.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.training.flops import FORWARDS_IN_A_STEP, Peak, known_peak

T = TypeVar("T")
Size = tuple[int, int, int]  # frames, height, width
GIB = 2**30


class Measured(Protocol):
    """What is asked of a denoiser."""

    def flops(self, latent_size: Size, text_len: int) -> int: ...

    def grid(self, latent_size: Sequence[int]) -> Size: ...


class Step(NamedTuple):
    """One optimizer step of the window.

    Attributes:
        number: Counted from 1.
        loss: Mean over its batches, of all processes.
        grad_norm: Before clipping, of all processes.
    """

    number: int
    loss: float
    grad_norm: float

    @property
    def is_finite(self) -> bool:
        """Whether both are numbers."""
        return isfinite(self.loss) and isfinite(self.grad_norm)


@dataclass
class BucketTotal:
    """What was seen of one bucket, by all processes; seconds by this one."""

    loss_sum: float = 0.0
    samples: float = 0.0
    batches: int = 0
    seconds: float = 0.0

    def add(self, other: "BucketTotal") -> None:
        """Count `other` too."""
        self.loss_sum += other.loss_sum
        self.samples += other.samples
        self.batches += other.batches
        self.seconds += other.seconds

    def figures(self) -> dict[str, float]:
        """`loss` (mean over samples), `samples`, and `s_per_batch` where this process had a batch."""
        values = {"loss": self.loss_sum / self.samples} if self.samples else {}
        values["samples"] = self.samples
        return values | ({"s_per_batch": self.seconds / self.batches} if self.batches else {})


class Reading(NamedTuple):
    """A window: what happened since the reading before.

    Attributes:
        steps: Its optimizer steps, those with a loss or gradient that is no number too.
        figures: For the log.
        buckets: Name -> figures; empty where the data have one size.
    """

    steps: tuple[Step, ...]
    figures: dict[str, float]
    buckets: dict[str, dict[str, float]]


@dataclass
class _Window:
    """What is collected between two readings; sums of numbers that every process has for itself."""

    step_losses: list[Tensor] = field(default_factory=list)
    grad_norms: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    batch_losses: list[Tensor] = field(default_factory=list)  # of the running step
    samples: int = 0
    tokens: int = 0
    flops: int = 0
    waited_s: float = 0.0
    spans: list[tuple[int, Any, Any]] = field(default_factory=list)  # (bucket, begin, end)

    def end_step(self, number: int, grad_norm: Tensor) -> None:
        """The batches since the last call were step `number`."""
        self.numbers.append(number)
        self.step_losses.append(torch.stack(self.batch_losses).double().mean())
        self.grad_norms.append(grad_norm.detach().double())
        self.batch_losses.clear()


def device_peak(device: torch.device, dtype: torch.dtype, given_tflops: float | None = None) -> Peak | None:
    """The peak rate of this device in `dtype`: `given_tflops`, or that of the GPU's name; None where neither tells."""
    if given_tflops is not None:
        return Peak(given_tflops, "peak_tflops")
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return known_peak(torch.cuda.get_device_name(device), dtype, tf32=tf32)


def describe_peak(peak: Peak | None) -> str:
    """What MFU will mean in this run."""
    if peak is None:
        return "no MFU: the peak of this device is not known; --peak-tflops sets it"
    return f"MFU is of {peak.tflops:g} TFLOP/s for each device ({peak.source})"


def build_meter(world: World, model: Measured, dataset: Any, peak: Peak | None, *, epoch: int = 0) -> "Meter":
    """The meter for a training of `model` on `dataset`, which may have buckets; see `Meter`."""
    used = [b for b in getattr(dataset, "buckets", ()) if b.batch_size is not None]
    return Meter(world, model, peak=peak, sizes=[(b.num_frames, b.height, b.width) for b in used], epoch=epoch)


class Meter:
    """Measures a training loop.

    Args:
        world: this process and the others.
        model: counts its own operations and tokens.
        peak: of one device, for MFU; None leaves MFU out.
        sizes: (frames, height, width) of the data's buckets, in the same order in all processes; none where the data have
            one size.
        epoch: in which the run begins.
    """

    def __init__(
        self, world: World, model: Measured, *, peak: Peak | None = None, sizes: Sequence[Size] = (), epoch: int = 0
    ) -> None:
        self.world, self.model, self.peak = world, model, peak
        self.sizes = list(dict.fromkeys(sizes)) or [(0, 0, 0)]
        self._index = {size: i for i, size in enumerate(self.sizes)}
        self._of_buckets = torch.zeros(2, len(self.sizes), dtype=torch.float64, device=world.device)  # loss, samples
        self._costs: dict[tuple[Size, int], tuple[int, int]] = {}
        self._epoch = [BucketTotal() for _ in self.sizes]
        self._epoch_number = epoch
        self._epoch_steps: list[int] = []  # the first and the last
        self._window = _Window()
        self._since: float | None = None  # when the reading before was
        self._retries = alloc_retries(world.device)  # until then
        self._begin: Any = None  # of the running batch

    def data_wait(self, batches: Iterable[T]) -> Iterator[T]:
        """The same items; how long each took to come is counted."""
        iterator = iter(batches)
        while True:
            begin = time.perf_counter()
            item = next(iterator, _END)
            self._window.waited_s += time.perf_counter() - begin
            if item is _END:
                return
            self._begin = self._mark()
            yield item

    def add(self, batch: Mapping[str, Any], z: Tensor, cond: Mapping[str, Tensor], loss: Tensor) -> None:
        """Count a micro-batch whose backward pass is under way.

        Args:
            batch: of the loader.
            z: its latents [B, C, T, h, w].
            cond: with the text `y` [B, 1, L, D].
            loss: [], its mean.
        """
        window, loss, samples = self._window, loss.detach(), len(z)
        tokens, flops = self._cost((z.shape[2], z.shape[3], z.shape[4]), cond["y"].shape[2])
        window.samples += batch["global_batch_size"]
        window.tokens += samples * tokens
        window.flops += samples * flops
        window.batch_losses.append(loss)
        bucket = 0
        if len(self.sizes) > 1:
            bucket = self._index[tuple(int(batch[name][0]) for name in ("num_frames", "height", "width"))]  # type: ignore[index]
        finite = torch.isfinite(loss)
        self._of_buckets[0, bucket] += torch.where(finite, loss * samples, 0.0)
        self._of_buckets[1, bucket] += finite * samples
        begin, self._begin = self._begin, self._mark()
        window.spans.append((bucket, begin, self._begin))

    def step(self, number: int, grad_norm: Tensor) -> None:
        """Step `number`, counted from 1, is done."""
        self._window.end_step(number, grad_norm)

    def read(self) -> Reading:
        """All figures since the reading before; all processes call it after the same step. Waits for the device."""
        window, self._window = self._window, _Window()
        losses, norms, of_buckets, tokens, flops, (peak_bytes, retries) = self._exchange(window)
        now = time.perf_counter()
        since, self._since = self._since, now
        steps = tuple(Step(*values) for values in zip(window.numbers, losses, norms, strict=True))
        self._epoch_steps = [*self._epoch_steps[:1], *window.numbers[:1]][:1] + window.numbers[-1:]
        totals = self._by_bucket(of_buckets, window.spans)
        for total, new in zip(self._epoch, totals, strict=True):
            total.add(new)
        figures = _means(steps)
        if since is not None:  # the first window has compilation, caches and workers that begin
            figures |= self._speeds(window, now - since, tokens, flops)
        if peak_bytes:
            figures["peak_gib"] = peak_bytes / GIB
        if retries:
            figures["alloc_retries"] = retries
        named = {_name(size): total.figures() for size, total in zip(self.sizes, totals, strict=True) if total.samples}
        return Reading(steps, figures, named if len(self.sizes) > 1 else {})

    def epoch_table(self, epoch: int) -> str:
        """Once `epoch` is another than in the call before: the table of all buckets since then; else nothing.

        It is as of the last reading, so that a few steps of the new epoch may be in it.
        """
        before, self._epoch_number = self._epoch_number, epoch
        if before == epoch or not self._epoch_steps:
            return ""
        (first, last), self._epoch_steps = self._epoch_steps, []
        totals, self._epoch = self._epoch, [BucketTotal() for _ in self.sizes]
        return bucket_table(f"epoch {before}, steps {first} to {last}", self.sizes, totals)

    def _exchange(
        self, window: _Window
    ) -> tuple[list[float], list[float], list[list[float]], float, float, Sequence[float]]:
        """The figures of all processes, in one sum, one maximum and one wait for the device."""
        device, n = self.world.device, len(window.numbers)
        own = torch.tensor([window.tokens, window.flops], dtype=torch.float64, device=device)
        sums = torch.cat([torch.stack(window.step_losses), self._of_buckets.flatten(), own])
        before, self._retries = self._retries, alloc_retries(device)
        memory = [_peak_bytes(device), self._retries - before]
        most = torch.tensor(memory, dtype=torch.float64, device=device)
        self._of_buckets = torch.zeros_like(self._of_buckets)
        if self.world.size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(most, dist.ReduceOp.MAX)
        norms = torch.stack([norm.to(device) for norm in window.grad_norms])
        values = torch.cat([sums / self.world.size, norms, most]).tolist()
        losses, values = values[:n], values[n:]
        k = len(self.sizes)
        share = self.world.dp_size  # processes of one sample have counted it once each
        of_buckets = [[share * value for value in values[:k]], [share * value for value in values[k : 2 * k]]]
        tokens, flops = share * values[2 * k], share * values[2 * k + 1]
        return losses, values[2 * k + 2 : -2], of_buckets, tokens, flops, values[-2:]

    def _speeds(self, window: _Window, seconds: float, tokens: float, flops: float) -> dict[str, float]:
        speeds = {
            "samples_per_s": window.samples / seconds,
            "tokens_per_s": tokens / seconds,
            "s_per_step": seconds / len(window.numbers),
            "data_wait": window.waited_s / seconds,
        }
        if self.peak is not None:
            speeds["mfu"] = flops / seconds / (self.peak.tflops * 1e12 * self.world.size)
        return speeds

    def _by_bucket(self, of_buckets: list[list[float]], spans: list[tuple[int, Any, Any]]) -> list[BucketTotal]:
        totals = [BucketTotal(loss, samples) for loss, samples in zip(*of_buckets, strict=True)]
        for bucket, begin, end in spans:
            totals[bucket].batches += 1
            totals[bucket].seconds += _seconds(begin, end)
        return totals

    def _cost(self, latent_size: Size, text_len: int) -> tuple[int, int]:
        """Tokens of a sample, and floating-point operations to train on it once."""
        key = latent_size, text_len
        if key not in self._costs:
            flops = FORWARDS_IN_A_STEP * self.model.flops(latent_size, text_len)
            self._costs[key] = prod(self.model.grid(latent_size)), flops
        return self._costs[key]

    def _mark(self) -> Any:
        """This moment, as the device sees it."""
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepRecord:
    """Losses and gradient norms alone, for a loop whose model counts no operations; read it as a `Meter`.

    Args:
        world: this process and the others.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._window = _Window()

    def add(self, loss: Tensor) -> None:
        """Count a micro-batch by its mean loss []."""
        self._window.batch_losses.append(loss.detach())

    def step(self, number: int, grad_norm: Tensor) -> None:
        """Step `number`, counted from 1, is done."""
        self._window.end_step(number, grad_norm)

    def read(self) -> Reading:
        """See `Meter.read`; the figures are `loss` and `grad_norm`."""
        window, self._window = self._window, _Window()
        losses = torch.stack(window.step_losses)
        if self.world.size > 1:
            dist.all_reduce(losses)
        norms = torch.stack([norm.to(losses.device) for norm in window.grad_norms])
        values = torch.stack([losses / self.world.size, norms]).tolist()
        steps = tuple(Step(*one) for one in zip(window.numbers, *values, strict=True))
        return Reading(steps, _means(steps), {})


def _means(steps: Sequence[Step]) -> dict[str, float]:
    """The mean loss and the last gradient norm, of the steps that are numbers; of all, where none is."""
    good = [step for step in steps if step.is_finite] or list(steps)
    return {"loss": sum(step.loss for step in good) / len(good), "grad_norm": good[-1].grad_norm}


_END: Any = object()


def bucket_table(title: str, sizes: Sequence[Size], totals: Sequence[BucketTotal]) -> str:
    """One row for each bucket that was seen."""
    seen = [(size, total) for size, total in zip(sizes, totals, strict=True) if total.samples]
    lines = [f"{title}:", f"  {'bucket':<18} {'samples':>9} {'loss':>9} {'s/batch':>9}"]
    for size, total in seen:
        time_s = f"{total.seconds / total.batches:.3f}" if total.batches else "-"
        name = _name(size) if any(size) else "all"
        lines.append(f"  {name:<18} {total.samples:>9.0f} {total.loss_sum / total.samples:>9.4f} {time_s:>9}")
    return "\n".join(lines)


def _name(size: Size) -> str:
    return "x".join(map(str, size))


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    return begin.elapsed_time(end) / 1e3  # of events, in ms


def _peak_bytes(device: torch.device) -> int:
    """The most memory that tensors took on the device since the start; 0 on a CPU, where it is not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def alloc_retries(device: torch.device) -> int:
    """How often memory ran out, so that PyTorch freed what it keeps for later: each time the device stands still."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0
