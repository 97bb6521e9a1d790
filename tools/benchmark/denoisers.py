"""Denoisers of real sizes with random weights: built, fed, trained, and compared with eager fp32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch._inductor.config
from torch import Tensor, nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, prefer_expandable_segments
from opensora.acceleration.engine import Engine, build_engine
from opensora.acceleration.sequence_parallel import Method, parallelise
from opensora.acceleration.streaming import stream_blocks
from opensora.registry import MODELS, SCHEDULERS
from opensora.training.meter import memory_use
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tools.benchmark.measure import Options, peak_gib, relative_error, reset_peak, seconds

TOY = {"hidden_size": 64, "depth": 2, "num_heads": 2, "caption_channels": 64}
"""Keyword arguments that make any denoiser small."""


class Steps(Protocol):
    """What of an `Engine` takes a training step."""

    model: nn.Module

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> Tensor: ...


class Inputs(NamedTuple):
    """A batch as a denoiser takes it: `model(z, t, **cond)`."""

    z: Tensor  # [B, C, T, H, W]
    t: Tensor  # [B]
    cond: dict[str, Tensor]


class Timed(NamedTuple):
    """Training steps."""

    seconds: float  # of a step
    peak_gib: float | None  # None on a CPU
    alloc_retries: int  # of all steps together

    @property
    def memory(self) -> str:
        """A cell of a table."""
        retries = f", {self.alloc_retries} retries" if self.alloc_retries else ""
        return "-" if self.peak_gib is None else f"{self.peak_gib:.1f}{retries}"


class Exact(NamedTuple):
    """What eager fp32 gives for the first sample of a batch; on the CPU, so that it takes no memory from what is measured."""

    prediction: Tensor
    gradients: dict[str, Tensor]  # of the loss of `_loss`, by the names of the weights


class Errors(NamedTuple):
    """Relative, in 2-norms; None = not known."""

    prediction: float | None
    gradient: float | None


def add_switches(options: Options) -> None:
    """Options for what is off by default in training, as it costs something or was not measured."""
    options.add_argument("--cuda-graphs", action="store_true", help="the config's cuda_graphs")
    options.add_argument("--inductor", nargs="+", default=[], metavar="NAME", help="settings of Inductor to switch on")


def switch_on(names: Sequence[str]) -> None:
    """Set what `add_switches` asks for in this process, whose memory is as in training.

    Raises:
        UserError: this version of Inductor has no such setting.
    """
    prefer_expandable_segments()
    for name in names:
        if getattr(torch._inductor.config, name, None) is None:
            raise UserError(f"--inductor: torch._inductor.config of torch {torch.__version__} has no {name}")
        setattr(torch._inductor.config, name, True)


def build(name: str, device: torch.device, text_len: int | None = None, **size: Any) -> Any:
    """A model, always with the same weights; those that start at zero would hide every difference and are random too."""
    torch.manual_seed(0)
    text = {} if text_len is None else {"model_max_length": text_len}
    with device, torch.no_grad():
        model: Any = MODELS.build({"type": name, **size}, **text)
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def inputs(model: Any, batch: int, latent: Sequence[int], device: torch.device, seed: int = 0) -> Inputs:
    """Random latents and text, which is as long as it can be."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(batch, model.in_channels, *latent, generator=rng)
    y = model.null_condition(batch)
    if y.is_floating_point():
        y = torch.randn(y.shape, generator=rng)
    cond = {"y": y, "mask": torch.ones(batch, y.shape[2], dtype=torch.bool)}
    sizes = {"fps": 24, "height": 8 * latent[1], "width": 8 * latent[2], "num_frames": latent[0]}
    cond |= {name: torch.full((batch,), float(value)) for name, value in sizes.items()}
    t = torch.linspace(100, 900, batch, device=device)
    return Inputs(z.to(device), t, {name: value.to(device) for name, value in cond.items()})


def start(
    model: Any,
    world: World,
    *,
    dtype: str,
    compiled: bool,
    checkpoint: str,
    engine: str = "ddp",
    method: Method = "auto",
    streams: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Engine:
    """The engine, ready to train: sequence parallelism, compiled blocks, activation checkpointing, fused AdamW, clipping.

    Args:
        method: of sequence parallelism, where processes share a sample.
        streams: arguments of `stream_blocks`.
        settings: more of `build_engine`, such as `cuda_graphs`.
    """
    if world.sp_size > 1:
        parallelise(model, world.sp_group, method=method)
    if compiled:
        compile_blocks(model.transformer_blocks())
    checkpoint_activations(model.transformer_blocks(), checkpoint, getattr(model, "stack_depths", None))
    adapters = any(not parameter.requires_grad for parameter in model.parameters())
    stream_blocks(model, world.device, adapters=adapters, **streams)
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=world.device.type == "cuda")
    return build_engine(engine, model, optimizer, world, dtype=dtype, grad_clip=1.0, **settings)


def training_step(engine: Steps, z: Tensor, cond: dict[str, Tensor], scheduler: str = "iddpm") -> Callable[[], None]:
    """A function that takes one step: forward, backward, clipping, AdamW."""
    losses = SCHEDULERS.build({"type": scheduler}).training_losses
    steps = count()

    def step() -> None:
        rngs = generators(0, "benchmark", next(steps), ids=range(len(z)), device=z.device)
        with engine.micro_step(last=True):
            loss = losses(engine.model, z, cond, generators=rngs).mean()
        engine.backward(loss)
        engine.step()

    return step


def timed(step: Callable[[], None], device: torch.device, warmup: int, steps: int) -> Timed:
    """The steps after the warm-up; memory is the most of both, as recorded passes allocate only while they are recorded."""
    reset_peak(device)
    for _ in range(warmup):
        step()
    before = memory_use(device)[1]
    found = seconds(step, device, steps)
    return Timed(found, peak_gib(device), memory_use(device)[1] - before)


def exact(model: Any, batch: Inputs) -> Exact:
    """Of a denoiser in fp32, which is not to be used afterwards: its blocks are checkpointed, and it keeps gradients."""
    checkpoint_activations(model.transformer_blocks())
    z, t, cond = batch
    found = model(z[:1], t[:1], **{name: value[:1] for name, value in cond.items()})
    _loss(found).backward()
    return Exact(found.detach().cpu(), {name: grad.cpu() for name, grad in _gradients(model)})


def errors_of(engine: Steps, batch: Inputs, right: Exact) -> Errors:
    """Of the forward and the backward pass that training uses, on the whole batch; the loss looks at its first sample."""
    with engine.micro_step(last=True):
        out = engine.model(batch.z, batch.t, **batch.cond)
        loss = _loss(out[:1])
    engine.backward(loss)
    scaled = getattr(engine, "scales_loss", False)  # fp16: the gradients are multiplied by the engine's own factor
    gradient = None if scaled else _gradient_error(engine.model, right.gradients)
    for weight in engine.model.parameters():
        weight.grad = None
    return Errors(relative_error(out[:1], right.prediction), gradient)


def _loss(prediction: Tensor) -> Tensor:
    """A mean with random signs, so that no part of the prediction is more important."""
    rng = torch.Generator(prediction.device).manual_seed(0)
    signs = torch.randint(0, 2, prediction.shape, generator=rng, device=prediction.device) * 2 - 1
    return (prediction.float() * signs).mean()


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)


def _gradient_error(model: nn.Module, right: dict[str, Tensor]) -> float:
    """A weight without a gradient where there should be one counts as zero."""
    found = dict(_gradients(model))
    difference = norm = 0.0
    for name, grad in right.items():
        wanted = grad.to(next(model.parameters()).device)
        off = wanted - found[name].float() if name in found else wanted
        difference += float(off.double().square().sum())
        norm += float(wanted.double().square().sum())
    return (difference / norm) ** 0.5
