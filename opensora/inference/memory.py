"""How much of a GPU's memory a run needs, before it starts; and what helps where it does not suffice.

Activations are not guessed: denoiser and decoder run once with tensors that have a shape and no content, while what is
allocated and freed is counted. Attention counts as what its fast kernels take, which never hold the scores. The estimate leaves
out what libraries and the allocator need on top, about a tenth (`MARGIN`).
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora.inference.build import calls_parts
from opensora.inference.request import Request
from opensora.models.vae.base import VideoVAE
from opensora.models.vae.splitting import check_tile_size
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MARGIN = 1.1
GIB = 2**30


class Estimate(NamedTuple):
    """Bytes on the device."""

    weights: dict[str, int]  # of model, vae, text_encoder, and of all blocks of the model
    one_block: int  # the largest block of the denoiser
    denoising: int  # activations of one call of the denoiser
    kept: int  # what a step cache keeps
    decoding: int  # activations of decoding one video

    def peak(self, policy: str) -> int:
        """The largest sum at any time under an offload policy."""
        model, vae, text = (self.weights[name] for name in ("model", "vae", "text_encoder"))
        working = self.denoising + self.kept
        if policy == "none":
            return model + vae + text + max(working, self.decoding)
        on_device = model if policy == "model" else model - self.weights["blocks"] + 3 * self.one_block
        return max(text, on_device + working, vae + self.decoding)


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Estimate]] = weakref.WeakKeyDictionary()
"""Estimates by pipeline, and by what distinguishes its runs."""


def estimate(pipeline: Any, request: Request, latent_size: tuple[int, int, int]) -> Estimate:
    """The memory that a run of `pipeline` for `request` needs; takes seconds for a large model, once for runs of one size."""
    known = _known.setdefault(pipeline, {})
    tiles = tuple(part.tile_size for part in pipeline.vae.modules() if isinstance(part, VideoVAE))
    key = (len(request.items), request.num_frames, latent_size, request.guidance_scale, pipeline.dtype, tiles)
    if key in known:
        return known[key]
    model, vae, encoder = pipeline.model, pipeline.vae, pipeline.text_encoder
    encoder = getattr(encoder, "encoder", encoder)
    blocks = [_num_bytes(block) for block in model.transformer_blocks()]
    sizes = {
        "model": _num_bytes(model),
        "vae": _num_bytes(vae),
        "text_encoder": _num_bytes(encoder),
        "blocks": sum(blocks),
    }
    one_at_a_time = pipeline.step_cache is not None and pipeline.step_cache.per_sample
    batch = 1 if one_at_a_time else len(request.items)
    scale = pipeline.scheduler.cfg_scale if request.guidance_scale is None else request.guidance_scale
    doubled = scale != 1 and _doubles(pipeline.scheduler) and pipeline.plan.cfg_group is None
    calls = 2 * batch if doubled else batch
    stream = pipeline.place.stream

    def denoise() -> Tensor:
        x, vector = torch.empty(calls, model.in_channels, *latent_size), torch.empty(calls)
        y, numbers = model.null_condition(calls), dict.fromkeys(("fps", "height", "width", "num_frames"), vector)
        with torch.autocast("cpu", pipeline.dtype, enabled=pipeline.dtype != torch.float32):
            return model.forward(x, vector, y, **numbers)  # without its hooks, which may look at values

    with nullcontext() if stream is None else stream.paused(), _in_one_process(model):
        denoising = _peak_bytes(model, denoise)
    denoising //= 1 if pipeline.plan.sp_group is None else dist.get_world_size(pipeline.plan.sp_group)
    tokens = calls * model.hidden_size * math.prod(model.grid(latent_size)) * pipeline.dtype.itemsize
    kept = 0 if pipeline.step_cache is None else pipeline.step_cache.num_kept * tokens
    decoding = _peak_bytes(vae, lambda: vae.decode(torch.empty(1, vae.out_channels, *latent_size), request.num_frames))
    known[key] = Estimate(sizes, max(blocks, default=0), denoising, kept, decoding)
    return known[key]


def warn_if_short(pipeline: Any, request: Request, latent_size: tuple[int, int, int]) -> None:
    """Before a run on a GPU, warn if it needs more memory than there is."""
    if pipeline.device.type != "cuda" or calls_parts(pipeline.scheduler):  # parts: no call stands for a step
        return
    needed = int(MARGIN * estimate(pipeline, request, latent_size).peak(pipeline.place.policy))
    free, _ = torch.cuda.mem_get_info(pipeline.device)
    available = free + torch.cuda.memory_reserved(pipeline.device)  # the weights that are there are a part of the need
    if needed > available:
        logger.warning(
            "this run needs about %.1f GiB, and %.1f GiB are available; it may run out of memory. %s",
            needed / GIB,
            available / GIB,
            advice(pipeline, request),
        )


@contextmanager
def oom_report(pipeline: Any, request: Request) -> Iterator[None]:
    """Turn running out of memory into a `UserError` that names the settings which help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        height, width = request.image_size
        raise UserError(
            f"out of memory on {pipeline.device} with {len(request.items)} videos of {request.num_frames} frames of "
            f"{height}x{width}: {str(error).splitlines()[0]} {advice(pipeline, request)}"
        ) from error


def advice(pipeline: Any, request: Request) -> str:
    """The settings that need less memory and are not in use yet, the cheapest first."""
    tiled = any(isinstance(part, VideoVAE) and part.tile_size for part in pipeline.vae.modules())
    options = [
        ("--batch-size 1", len(request.items) > 1),
        ("--dtype bf16", pipeline.dtype == torch.float32),
        ("--vae-tiling 256", not tiled),
        ("--offload model", pipeline.place.policy == "none"),
        ("--scheduler.guidance.batching split", _doubles(pipeline.scheduler)),
        ("--offload block", pipeline.place.policy != "block"),
        ("a smaller size, or fewer frames", True),
    ]
    return f"What helps: {', '.join(name for name, useful in options if useful)}."


def _doubles(scheduler: Any) -> bool:
    """Whether guidance calls the model with a doubled batch, and could do with two calls."""
    return not calls_parts(scheduler) and scheduler.guidance.batching == "joint"


def tile_images(vae: nn.Module, size: int) -> None:
    """Let a VAE, or the one of its parts that takes pixels, encode and decode in tiles of `size` pixels.

    Raises:
        UserError: the size is no multiple of a latent cell.
    """
    parts = [part for part in vae.modules() if isinstance(part, VideoVAE) and part.in_channels == 3]
    image_vae = parts[-1]  # the innermost: parts come after what they are parts of
    check_tile_size(size, image_vae.strides[1:])
    image_vae.tile_size = size


def _num_bytes(part: Any) -> int:
    """Of the parameters and buffers of a module; 0 for what is none."""
    if not isinstance(part, nn.Module):
        return 0
    unique = {id(tensor): tensor for tensor in [*part.parameters(), *part.buffers()]}  # weights may be tied
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def _peak_bytes(module: nn.Module, call: Callable[[], object]) -> int:
    """The largest number of bytes that are allocated at a time while `call` runs, besides the module's weights."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # as if on a CPU: own kernels of GPUs do not know tensors without content
    with (
        torch.compiler.set_stance("force_eager"),
        _emptied(module, fake),
        torch.no_grad(),
        fake,
        torch.device("cpu"),
        _FusedAttention(),
        _Counted([*module.parameters(), *module.buffers()]) as counted,
    ):
        call()
    return counted.peak


@contextmanager
def _in_one_process(model: nn.Module) -> Iterator[None]:
    """Without sequence parallelism, whose exchanges need content."""
    hooked = [(part, name) for part in model.modules() for name in ("sp_ranks", "exchange") if hasattr(part, name)]
    before = [getattr(part, name) for part, name in hooked]
    for part, name in hooked:
        setattr(part, name, None)
    try:
        yield
    finally:
        for (part, name), value in zip(hooked, before, strict=True):
            setattr(part, name, value)


@contextmanager
def _emptied(module: nn.Module, fake: FakeTensorMode) -> Iterator[None]:
    """The module's weights without content, and afterwards as they were."""
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    before = [dict(table) for table in tables]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                with fake:
                    empty = torch.empty_like(tensor, device="cpu")
                table[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    try:
        yield
    finally:
        for table, tensors in zip(tables, before, strict=True):
            table.update(tensors)


class _FusedAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` as its fast kernels do it: without the scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, _, v = args[:3]
            return q.new_empty(*q.shape[:-1], v.shape[-1])
        return func(*args, **(kwargs or {}))


class _Counted(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed; those of `others` do not count."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._others = [tensor.untyped_storage() for tensor in others]
        self._alive: dict[int, weakref.ref[Any]] = {storage._cdata: weakref.ref(storage) for storage in self._others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._watch(tensor)
        return out

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:  # a view of what is known
            return

        def free(_: object) -> None:
            del self._alive[key]
            self._now -= size

        self._alive[key] = weakref.ref(storage, free)
        self._now += size
        self.peak = max(self.peak, self._now)
