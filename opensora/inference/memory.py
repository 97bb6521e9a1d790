"""How much of a GPU's memory a run needs, before it starts; and what helps where it does not suffice.

Denoiser and decoder run once with tensors that have a shape and no content, while what is allocated and freed is counted.
Attention counts as what its fast kernels take, which never hold the scores. The estimate leaves out what libraries and the
allocator need on top, about a tenth (`MARGIN`).
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora.inference.build import calls_parts
from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MARGIN = 1.1
GIB = 2**30


def estimate(pipeline: Any, batch: int, num_frames: int, latent_size: Sequence[int], guidance_scale: float) -> int:
    """Bytes on the device at the peak of a run in one process, under the pipeline's offload policy; takes seconds.

    Args:
        pipeline: a `VideoPipeline`.
        batch: videos that are sampled together.
        num_frames, latent_size: of a video, and (t, h, w) of its latents.
        guidance_scale: 1: the model is not called with a doubled batch.
    """
    model, vae, place, cache = pipeline.model, pipeline.vae, pipeline.place, pipeline.step_cache
    doubled = guidance_scale != 1 and _joins_guidance(pipeline.scheduler) and pipeline.plan.cfg_group is None
    calls = (1 if cache is not None and cache.per_sample else batch) * (2 if doubled else 1)

    def denoise() -> Tensor:
        x, vector = torch.empty(calls, model.in_channels, *latent_size), torch.empty(calls)
        numbers = dict.fromkeys(("fps", "height", "width", "num_frames"), vector)
        with torch.autocast("cpu", pipeline.dtype, enabled=pipeline.dtype != torch.float32):
            return model.forward(x, vector, model.null_condition(calls), **numbers)  # without hooks, which read values

    with nullcontext() if place.stream is None else place.stream.paused():
        denoising = peak_bytes(model, denoise)
    if cache is not None:
        tokens = calls * model.hidden_size * math.prod(model.grid(latent_size)) * pipeline.dtype.itemsize
        denoising += cache.num_kept * tokens
    decoding = peak_bytes(vae, lambda: vae.decode(torch.empty(1, vae.out_channels, *latent_size), num_frames))
    weights, vae_weights = _num_bytes(model), _num_bytes(vae)
    text_weights = _num_bytes(getattr(pipeline.text_encoder, "encoder", pipeline.text_encoder))
    if place.policy == "none":
        return weights + vae_weights + text_weights + max(denoising, decoding)
    if place.policy == "block":  # two of them at a time, and the first
        blocks = [_num_bytes(block) for block in model.transformer_blocks()]
        weights += 3 * max(blocks, default=0) - sum(blocks)
    return max(text_weights, weights + denoising, vae_weights + decoding)


def warn_if_short(
    pipeline: Any, batch: int, num_frames: int, latent_size: Sequence[int], guidance_scale: float
) -> None:
    """Before a run of one process on a GPU, warn if it needs more memory than there is."""
    on_gpu = pipeline.device.type == "cuda" and pipeline.plan.sp_group is None  # exchanges need content
    if not on_gpu or calls_parts(pipeline.scheduler):  # parts: no call stands for a step
        return
    needed = int(MARGIN * estimate(pipeline, batch, num_frames, latent_size, guidance_scale))
    free, _ = torch.cuda.mem_get_info(pipeline.device)
    available = free + torch.cuda.memory_reserved(pipeline.device)  # the weights that are there are a part of the need
    if needed > available:
        logger.warning(
            "this run needs about %.1f GiB, and %.1f GiB are available; it may run out of memory. %s",
            needed / GIB,
            available / GIB,
            advice(pipeline, batch),
        )


@contextmanager
def oom_report(pipeline: Any, batch: int, num_frames: int, image_size: tuple[int, int]) -> Iterator[None]:
    """Turn running out of memory into a `UserError` that names the settings which help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        height, width = image_size
        raise UserError(
            f"out of memory on {pipeline.device} with {batch} videos of {num_frames} frames of {height}x{width}: "
            f"{str(error).splitlines()[0]} {advice(pipeline, batch)}"
        ) from error


def advice(pipeline: Any, batch: int) -> str:
    """The settings that need less memory and are not in use yet, the cheapest first."""
    tiled = any(isinstance(part, VideoVAE) and part.tile_size for part in pipeline.vae.modules())
    options = [
        ("--batch-size 1", batch > 1),
        ("--dtype bf16", pipeline.dtype == torch.float32),
        ("--vae-tiling 256", not tiled),
        ("--offload model", pipeline.place.policy == "none"),
        ("--scheduler.guidance.batching split", _joins_guidance(pipeline.scheduler)),
        ("--offload block", pipeline.place.policy != "block"),
        ("a smaller size, or fewer frames", True),
    ]
    return f"What helps: {', '.join(name for name, useful in options if useful)}."


def _joins_guidance(scheduler: Any) -> bool:
    """Whether guidance calls the model with a doubled batch, and could do with two calls."""
    return not calls_parts(scheduler) and scheduler.guidance.batching == "joint"


def _num_bytes(part: Any) -> int:
    """Of the parameters and buffers of a module; 0 for what is none."""
    tensors = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else []
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())  # tied: once


def peak_bytes(module: nn.Module, call: Callable[[], object]) -> int:
    """The largest number of bytes that are allocated at a time while `call` runs, besides the module's weights."""

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self) -> object:
            return call()

    calling, fake = Calling(), FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        weights = {
            n: torch.empty_like(t, device="cpu") for n, t in [*calling.named_parameters(), *calling.named_buffers()]
        }
    # as if on a CPU: own kernels of GPUs do not know tensors without content
    with (
        torch.compiler.set_stance("force_eager"),
        torch.no_grad(),
        fake,
        torch.device("cpu"),
        _FusedAttention(),
        _Counted(weights.values()) as counted,
    ):
        torch.func.functional_call(calling, weights, ())
    return counted.peak


class _FusedAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` as its fast kernels do it: without the scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, _, v = args[:3]
            return q.new_empty(*q.shape[:-1], v.shape[-1])
        return func(*args, **(kwargs or {}))


class _Counted(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed; those of `known` do not count."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.peak = self.now = 0
        self.alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, FakeTensor) else None
            if storage is not None and storage._cdata not in self.alive:  # no view of what is known
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size
