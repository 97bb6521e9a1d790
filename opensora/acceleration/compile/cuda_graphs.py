"""CUDA graphs for training: a model's forward and backward pass are captured once for each size of its input, then replayed.

With small batches the GPU is done with each kernel before the host has launched the next; a graph is one launch for all. Applied from
outside, around a denoiser's `forward`: parameters' names, loss, clipping, optimizer and EMA stay as they are.

What a graph needs: inputs, result and gradients have fixed addresses (inputs are copied there, the result is copied out, gradients
are added to buffers that all sizes share); weights change in place; nothing is drawn at random (docs/adr/0006) or asked of the GPU
inside; casts of weights by autocast are part of the graph. The graphs of all sizes share one memory pool, so that many take little
more than the largest; therefore a backward pass must follow its own forward pass.

Processes that share a sample (sequence parallelism) capture their exchanges too: they meet the same sizes in the same order. NCCL
waits at its end, for ever, until graphs of its messages are freed (since 2.26), so that `distributed.shutdown` does that first.
"""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opensora.acceleration.distributed import release_at_shutdown
from opensora.acceleration.patching import Forward, wrap_forward
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MAX_SIZES = 64
"""More than that, and sizes probably never repeat. A graph takes some MiB besides the pool."""
WARM_UP = 3
"""Passes before a capture: what compilers, cuDNN and cuBLAS do at first cannot be captured."""
ALIGNED = 128
"""Each gradient begins at a multiple of so many elements, as fused optimizers read several at a time."""

Call = Callable[[], object]


class EagerCapture:
    """For a device without graphs: a replay calls again."""

    def on_side_stream(self, call: Call) -> None:
        """Call where capturing takes place, without capturing it."""
        call()

    def capture(self, call: Call) -> Call:
        """Capture `call`; returns what does the same work, on the same memory."""
        return call

    def release(self) -> None:
        """Free all graphs, which cannot be replayed any more."""


class GraphCapture(EagerCapture):
    """CUDA graphs, captured on a side stream into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def on_side_stream(self, call: Call) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, call: Call) -> Call:
        # this does not do the work; other threads, such as one that pins batches, may go on
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            call()
        self.graphs.append(graph)
        return graph.replay

    def release(self) -> None:
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()


class GradientBuffers:
    """A fixed address for the gradient of each of the weights, whatever the size of the batch; one buffer for each dtype."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.views: dict[Tensor, Tensor] = {}
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def attach(self, weights: Sequence[Tensor]) -> None:
        """Let the weights' gradients lie in the buffers: zero where there was none, as it was where there was one."""
        for dtype in dict.fromkeys(weight.dtype for weight in self.weights) if not self.views else ():
            own = [weight for weight in self.weights if weight.dtype == dtype]
            sizes = [-(-weight.numel() // ALIGNED) * ALIGNED for weight in own]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=own[0].device)
            self.buffers.append(buffer)
            for weight, part in zip(own, buffer.split(sizes), strict=True):
                self.views[weight] = part[: weight.numel()].view(weight.shape)
        fresh = []
        for weight in weights:
            view = self.views[weight]
            if weight.grad is None:
                fresh.append(view)
            elif weight.grad is not view:
                view.copy_(weight.grad)
            weight.grad = view
        if fresh:
            torch._foreach_zero_(fresh)

    @torch.no_grad()
    def average(self) -> None:
        """Give each weight the mean of all processes' gradients, where none counts as zero; all processes call it.

        A weight that has none in any process has none afterwards.
        """
        found = torch.tensor([weight.grad is not None for weight in self.weights], device=self.weights[0].device)
        missing = [(i, weight) for i, weight in enumerate(self.weights) if weight.grad is None]
        self.attach(self.weights)
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


class CUDAGraphRunner:
    """The two passes for one size of the input, captured for the `inputs` of a first call, tensors and whatever else."""

    def __init__(
        self,
        forward: Callable[[Sequence[Any]], Tensor],
        inputs: Sequence[Any],
        capture: EagerCapture,
        gradients: GradientBuffers,
    ) -> None:
        self.forward, self.gradients = forward, gradients
        self.inputs = [  # memory of their own, with a gradient where they have one
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in inputs
        ]
        self.weights: list[Tensor] = []  # that get a gradient
        self.out = self.grad_out = torch.empty(())
        torch.clear_autocast_cache()  # casts of weights are part of the graph, and of no other pass
        capture.on_side_stream(self._warm_up)
        self.grad_out = torch.empty_like(self.out, requires_grad=False)
        self.out = torch.empty(())  # frees the autograd graph of the last pass
        torch.clear_autocast_cache()
        self._replay_forward = capture.capture(self._forward)
        torch.clear_autocast_cache()
        gradients.attach(self.weights)
        self._replay_backward = capture.capture(self._backward)

    def run_forward(self, inputs: Sequence[Any]) -> Tensor:
        """The result for other inputs of the same size, in memory of its own."""
        for static, value in zip(self.inputs, inputs, strict=True):
            if isinstance(static, Tensor):
                static.detach().copy_(value)
        self._replay_forward()
        return self.out.detach().clone()

    def run_backward(self, grad_out: Tensor) -> list[Tensor | None]:
        """Add the weights' gradients; returns those of the inputs."""
        self.grad_out.copy_(grad_out)
        self.gradients.attach(self.weights)
        self._replay_backward()
        return [None if (grad := getattr(static, "grad", None)) is None else grad.clone() for static in self.inputs]

    def _forward(self) -> None:
        with torch.enable_grad():  # autograd switches it off inside of `_Replayed`
            self.out = self.forward(self.inputs)

    def _backward(self) -> None:
        for static in self.inputs:
            if isinstance(static, Tensor):
                static.grad = None
        self.out.backward(self.grad_out)

    def _warm_up(self) -> None:
        # their gradients are dropped; they show what weights get some
        weights = self.gradients.weights
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


class CUDAGraphPool:
    """The graphs of a model, one runner for each size, made when they are needed; called as the model's `forward`."""

    def __init__(self, forward: Forward, model: nn.Module, capture: EagerCapture) -> None:
        self.forward, self.model, self.capture = forward, model, capture
        self.device = next(model.parameters()).device
        self.gradients = GradientBuffers([weight for weight in model.parameters() if weight.requires_grad])
        self.runners: dict[Any, CUDAGraphRunner] = {}
        self.is_full = False
        self.latest: object = None  # the last forward pass, whose activations are in the pool
        release_at_shutdown(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        inputs, spec = tree_flatten((args, kwargs))
        sizes = tuple(
            (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value
            for value in inputs
        )
        cast = torch.get_autocast_dtype(self.device.type), torch.is_autocast_enabled(self.device.type)
        key = (str(spec), sizes, self.model.training, cast)
        if key not in self.runners and len(self.runners) == MAX_SIZES:
            if not self.is_full:
                self.is_full = True
                logger.warning(
                    "cuda_graphs: the model has met more than %d sizes of its input, the last one %s. Those beyond are "
                    "computed without a graph, which pays only if sizes return: fewer buckets would.",
                    MAX_SIZES, _described(inputs),
                )  # fmt: skip
            out: Tensor = self.forward(*args, **kwargs)
            return out
        if key not in self.runners:
            self.runners[key] = self._captured(inputs, lambda static: tree_unflatten(list(static), spec))
        needs_grad = torch.ones((), requires_grad=True)  # the result has a gradient, also where no input has one
        return _Replayed.apply(self, self.runners[key], needs_grad, *inputs)

    def release(self) -> None:
        """Free all graphs; another call would capture them anew."""
        self.runners.clear()
        self.latest = None
        self.capture.release()

    def _captured(self, inputs: Sequence[Any], arguments: Callable[[Sequence[Any]], Any]) -> CUDAGraphRunner:
        for value in inputs:
            if isinstance(value, Tensor) and value.device.type != self.device.type:
                raise UserError(
                    f"cuda_graphs: an input {list(value.shape)} of the model is on {value.device}, the model on {self.device}. "
                    "What is copied there inside of a graph would never change: move it before."
                )

        def forward(static: Sequence[Any]) -> Tensor:
            args, kwargs = arguments(static)
            out: Tensor = self.forward(*args, **kwargs)
            return out

        try:
            return CUDAGraphRunner(forward, inputs, self.capture, self.gradients)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "captur" not in str(error):
                raise
            raise UserError(
                f"cuda_graphs: a {type(self.model).__name__} cannot be captured for inputs {_described(inputs)}: "
                f"{str(error).strip().partition(chr(10))[0]} Nothing inside may wait for the GPU. Use cuda_graphs=False."
            ) from error


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pool: CUDAGraphPool, runner: CUDAGraphRunner, _needs_grad: Tensor, *inputs: Any) -> Tensor:
        ctx.pool, ctx.runner = pool, runner
        ctx.pass_id = pool.latest = object()
        return runner.run_forward(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.pass_id is not ctx.pool.latest:
            raise RuntimeError(
                "cuda_graphs: the model ran again before the backward pass of an earlier forward pass, whose activations are gone. "
                "Call backward after each forward pass, or use cuda_graphs=False."
            )
        ctx.pool.latest = None  # a second backward pass finds nothing
        return None, None, None, *ctx.runner.run_backward(grad_out)


def capture_training(model: nn.Module, capture: EagerCapture | None = None) -> CUDAGraphPool:
    """Let a model's passes with gradients be captured and replayed. Apply it after compilation and activation checkpointing.

    Args:
        model: on its device; its `forward` gives one tensor and draws nothing at random.
        capture: by default that of the model's device; a CPU has no graphs, and calls again.

    Raises:
        UserError: the model's inputs have another size in each step.
    """
    if getattr(model, "varying_lengths", False):
        raise UserError(
            f"cuda_graphs: a {type(model).__name__} sees another number of patches in each step, and a graph is for one. Leave it out."
        )
    device = next(model.parameters()).device
    pool = CUDAGraphPool(
        model.forward, model, capture or (GraphCapture(device) if device.type == "cuda" else EagerCapture())
    )

    def wrap(forward: Forward) -> Forward:
        @wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return pool(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

        return wrapped

    wrap_forward(model, wrap)
    return pool


def _described(inputs: Sequence[Any]) -> str:
    return ", ".join(str(list(value.shape)) if isinstance(value, Tensor) else repr(value) for value in inputs)
