"""CUDA graphs for training: a model's forward and backward pass are recorded once for each size of its input, then replayed.

A step launches some thousands of kernels. With small batches the GPU does each in less time than the host needs to launch the
next, and waits. A recorded pass is one launch. Applied from outside, around a denoiser's `forward`: no name of a parameter
changes, and the loss, clipping, optimizer and average stay as they are.

What a recording needs, and how it is given: inputs, result and gradients lie at the same place in each step (inputs are copied there,
the result is copied out, gradients are added to buffers that all sizes share); weights change where they lie; nothing is drawn at
random (docs/adr/0006) or asked of the GPU inside; casts of weights by autocast are part of the recording. The recordings of all sizes
share one pool of memory, so that many take little more than the largest; therefore a backward pass must follow its own forward pass.

Processes that share a sample (sequence parallelism) record their exchanges too, which NCCL allows: they meet the same sizes in the
same order, so that all of them record and replay together. NCCL waits at its end, for ever, for recordings of its messages to be
given up (since 2.26), so that `distributed.shutdown` does that first.
"""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from opensora.acceleration.distributed import release_at_shutdown
from opensora.acceleration.patching import Forward, wrap_forward
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MAX_SIZES = 64
"""More than that, and sizes probably never repeat. A recording takes some MiB besides the pool."""
WARM_UP = 3
"""Passes before a recording: what compilers, cuDNN and cuBLAS do at first cannot be recorded."""

ALIGNED = 128
"""Each gradient begins at a multiple of so many numbers, as fused optimizers read several at a time."""

Call = Callable[[], object]


class Recorder(Protocol):
    """Records what a function makes a device do."""

    def beside(self, call: Call) -> None:
        """Do something where recording takes place, without recording it."""

    def record(self, call: Call) -> Call:
        """Record `call` without doing it; returns what does the same work, on the same memory."""

    def release(self) -> None:
        """Give up all recordings, which cannot be replayed any more."""


class CudaRecorder:
    """Records on a stream of its own, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def beside(self, call: Call) -> None:
        """See `Recorder.beside`."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, call: Call) -> Call:
        """See `Recorder.record`; other threads, such as one that pins batches, may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            call()
        self.graphs.append(graph)
        return graph.replay

    def release(self) -> None:
        """See `Recorder.release`."""
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()


class Repeater:
    """For a device without graphs: work is done again by calling again."""

    def beside(self, call: Call) -> None:
        """See `Recorder.beside`."""
        call()

    def record(self, call: Call) -> Call:
        """See `Recorder.record`."""
        return call

    def release(self) -> None:
        """See `Recorder.release`."""


class Gradients:
    """One place for the gradient of each weight, whatever the size of the batch; all lie in one buffer for each number format.

    Args:
        weights: that may get gradients.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.places: dict[Tensor, Tensor] = {}
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def ready(self, weights: Sequence[Tensor]) -> None:
        """Let the weights' gradients lie at their places: zero where there was none, as it was where there was one."""
        if not self.places:
            self._allocate()
        fresh = []
        for weight in weights:
            place = self.places[weight]
            if weight.grad is None:
                fresh.append(place)
            elif weight.grad is not place:
                place.copy_(weight.grad)
            weight.grad = place
        if fresh:
            torch._foreach_zero_(fresh)

    @torch.no_grad()
    def average(self) -> None:
        """Give each weight the mean of all processes' gradients, in place; where a process has none, it counts as zero.

        A weight that has none in any process has none afterwards. All processes call it, with a message for each number format.
        """
        found = torch.tensor([weight.grad is not None for weight in self.weights], device=self.weights[0].device)
        missing = [(i, weight) for i, weight in enumerate(self.weights) if weight.grad is None]
        self.ready(self.weights)
        for buffer in self.buffers:
            if dist.get_backend() == "nccl":
                dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
            else:  # only NCCL divides
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()
        found = found.to(torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if missing:  # only then is the GPU waited for
            anywhere = found.tolist()
            for i, weight in missing:
                weight.grad = weight.grad if anywhere[i] else None

    def _allocate(self) -> None:
        """The same in all processes, whichever weights get a gradient in which."""
        for dtype in dict.fromkeys(weight.dtype for weight in self.weights):
            weights = [weight for weight in self.weights if weight.dtype == dtype]
            sizes = [-(-weight.numel() // ALIGNED) * ALIGNED for weight in weights]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device)
            self.buffers.append(buffer)
            for weight, part in zip(weights, buffer.split(sizes), strict=True):
                self.places[weight] = part[: weight.numel()].view(weight.shape)


class Recording:
    """The two passes for one size of the input.

    Args:
        forward: takes the inputs and gives one tensor.
        weights: that may get gradients.
        inputs: of the first call; tensors and whatever else.
        recorder, gradients: shared by all sizes.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Any]], Tensor],
        weights: Sequence[Tensor],
        inputs: Sequence[Any],
        recorder: Recorder,
        gradients: Gradients,
    ) -> None:
        self.forward, self.gradients = forward, gradients
        self.inputs = [_place(value) if isinstance(value, Tensor) else value for value in inputs]
        self.weights: list[Tensor] = []  # that get a gradient
        self.out = self.grad_out = torch.empty(())
        torch.clear_autocast_cache()  # casts of weights are part of the recording, and of no other pass
        recorder.beside(lambda: self._warm_up(weights))
        self.grad_out = torch.empty_like(self.out, requires_grad=False)
        self.out = torch.empty(())  # gives up the graph of the last pass
        torch.clear_autocast_cache()
        self._play_forward = recorder.record(self._forward)
        torch.clear_autocast_cache()
        gradients.ready(self.weights)
        self._play_backward = recorder.record(self._backward)

    def run_forward(self, inputs: Sequence[Any]) -> Tensor:
        """The result for other inputs of the same size, in memory of its own."""
        for place, value in zip(self.inputs, inputs, strict=True):
            if isinstance(place, Tensor):
                place.detach().copy_(value)
        self._play_forward()
        return self.out.detach().clone()

    def run_backward(self, grad_out: Tensor) -> list[Tensor | None]:
        """Add the weights' gradients; returns those of the inputs."""
        self.grad_out.copy_(grad_out)
        self.gradients.ready(self.weights)
        self._play_backward()
        return [None if (grad := getattr(place, "grad", None)) is None else grad.clone() for place in self.inputs]

    def _forward(self) -> None:
        with torch.enable_grad():  # autograd switches it off inside of `_Replayed`
            self.out = self.forward(self.inputs)

    def _backward(self) -> None:
        for place in self.inputs:
            if isinstance(place, Tensor):
                place.grad = None
        self.out.backward(self.grad_out)

    def _warm_up(self, weights: Sequence[Tensor]) -> None:
        """Some passes whose gradients nobody gets, which tell the weights that get some."""
        kept = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        for _ in range(WARM_UP):
            self._forward()
            self.grad_out = torch.zeros_like(self.out, requires_grad=False)
            self._backward()
        self.weights = [weight for weight in weights if weight.grad is not None]
        for weight, grad in zip(weights, kept, strict=True):
            weight.grad = grad


class Recordings:
    """The recordings of a model, one for each size, made when they are needed.

    Args:
        forward: the model's, which gives one tensor.
        model: for its weights and its mode.
        recorder: of the device.
    """

    def __init__(self, forward: Forward, model: nn.Module, recorder: Recorder) -> None:
        self.forward, self.model, self.recorder = forward, model, recorder
        self.device = next(model.parameters()).device
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.gradients = Gradients(self.weights)
        self.made: dict[Any, Recording] = {}
        self.is_full = False
        self.turn: object = None  # of the last forward pass, whose activations are in the pool
        release_at_shutdown(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the model's `forward`."""
        inputs, spec = tree_flatten((args, kwargs))
        recording = self._recording(inputs, spec)
        if recording is None:
            out: Tensor = self.forward(*args, **kwargs)
            return out
        wants = torch.ones((), requires_grad=True)  # the result has a gradient, also where no input has one
        return _Replayed.apply(self, recording, wants, *inputs)

    def release(self) -> None:
        """Give up all recordings; another call would make them anew."""
        self.made.clear()
        self.turn = None
        self.recorder.release()

    def _recording(self, inputs: Sequence[Any], spec: TreeSpec) -> Recording | None:
        """That of inputs of this size; None beyond `MAX_SIZES`."""
        sizes = tuple(_size(value) for value in inputs)
        cast = torch.get_autocast_dtype(self.device.type), torch.is_autocast_enabled(self.device.type)
        key = (str(spec), sizes, self.model.training, cast)
        if key not in self.made:
            if len(self.made) == MAX_SIZES:
                if not self.is_full:
                    self.is_full = True
                    logger.warning(
                        "cuda_graphs: the model has met more than %d sizes of its input, the last one %s. Those beyond are "
                        "computed without a recording, which pays only if sizes return: fewer buckets would.",
                        MAX_SIZES, _told(inputs),
                    )  # fmt: skip
                return None
            self._check(inputs)
            self.made[key] = self._record(inputs, spec)
        return self.made[key]

    def _record(self, inputs: Sequence[Any], spec: TreeSpec) -> Recording:
        def forward(places: Sequence[Any]) -> Tensor:
            args, kwargs = tree_unflatten(list(places), spec)
            out: Tensor = self.forward(*args, **kwargs)
            return out

        try:
            return Recording(forward, self.weights, inputs, self.recorder, self.gradients)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "captur" not in str(error):
                raise
            raise UserError(
                f"cuda_graphs: a {type(self.model).__name__} cannot be recorded for inputs {_told(inputs)}: "
                f"{str(error).strip().partition(chr(10))[0]} Nothing inside may wait for the GPU. Use cuda_graphs=False."
            ) from error

    def _check(self, inputs: Sequence[Any]) -> None:
        for value in inputs:
            if isinstance(value, Tensor) and value.device.type != self.device.type:
                raise UserError(
                    f"cuda_graphs: an input {_told([value])} of the model is on {value.device}, the model on {self.device}. "
                    "What is copied there inside of a recording would never change: move it before."
                )


class _Replayed(torch.autograd.Function):
    """A recording as one operation."""

    @staticmethod
    def forward(ctx: Any, recordings: Recordings, recording: Recording, _wants: Tensor, *inputs: Any) -> Tensor:
        ctx.recordings, ctx.recording = recordings, recording
        ctx.turn = recordings.turn = object()
        return recording.run_forward(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turn is not ctx.recordings.turn:
            raise RuntimeError(
                "cuda_graphs: the model ran again before the backward pass of an earlier forward pass, whose activations are gone. "
                "Call backward after each forward pass, or use cuda_graphs=False."
            )
        ctx.recordings.turn = None  # a second backward pass finds nothing
        return None, None, None, *ctx.recording.run_backward(grad_out)


def record_training(model: nn.Module, recorder: Recorder | None = None) -> Recordings:
    """Let a model's passes with gradients be recorded and replayed; those without are as they were.

    Apply it last, after compilation and activation checkpointing. A first call of each size takes several times as long.

    Args:
        model: on its device; its `forward` gives one tensor and draws nothing at random.
        recorder: by default that of the model's device; a CPU has no graphs, and calls again.

    Raises:
        UserError: the model's inputs have another size in each step.
    """
    if getattr(model, "varying_lengths", False):
        raise UserError(
            f"cuda_graphs: a {type(model).__name__} sees another number of patches in each step, and a recording is for one. Leave it out."
        )
    device = next(model.parameters()).device
    recorder = recorder or (CudaRecorder(device) if device.type == "cuda" else Repeater())
    made: list[Recordings] = []

    def wrap(forward: Forward) -> Forward:
        recordings = Recordings(forward, model, recorder)
        made.append(recordings)

        @wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return recordings(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

        return wrapped

    wrap_forward(model, wrap)
    return made[0]


def _place(value: Tensor) -> Tensor:
    """Memory for an input, with its numbers, and with a gradient where it has one."""
    return value.detach().clone().requires_grad_(value.requires_grad)


def _size(value: Any) -> Any:
    """What a recording depends on."""
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value


def _told(inputs: Sequence[Any]) -> str:
    """For a message."""
    return ", ".join(str(list(value.shape)) if isinstance(value, Tensor) else repr(value) for value in inputs)
