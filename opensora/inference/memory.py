"""How much of a GPU's memory a run needs, before it starts; and what helps where it does not suffice."""

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opensora.inference.build import calls_parts
from opensora.models.vae.base import VideoVAE
from opensora.models.vae.splitting import check_tile_size
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

DENOISER_TENSORS = 12  # as large as all tokens, at the peak of a block: 11 to 12 in fp32, up to 17 of STDiT3's in bf16
DECODER_TENSORS = 6  # as large as the input of the last convolution, at the peak of an image decoder
MARGIN = 1.1  # libraries and the allocator
GIB = 2**30


def estimate(
    pipeline: Any, batch: int, num_frames: int, image_size: tuple[int, int], guidance_scale: float | None = None
) -> int:
    """About how many bytes a run takes at its peak, under the pipeline's offload policy.

    Args:
        pipeline: a `VideoPipeline`.
        batch: videos that are sampled together.
        num_frames, image_size: of a video; (height, width).
        guidance_scale: None = the scheduler's own.
    """
    model, vae, place, cache = pipeline.model, pipeline.vae, pipeline.place, pipeline.step_cache
    scale = pipeline.scheduler.cfg_scale if guidance_scale is None else guidance_scale
    doubled = scale != 1 and _joins_guidance(pipeline.scheduler) and pipeline.plan.cfg_group is None
    calls = (1 if cache is not None and cache.per_sample else batch) * (2 if doubled else 1)
    tokens = calls * math.prod(model.grid(vae.latent_size((num_frames, *image_size))))
    processes = 1 if pipeline.plan.sp_group is None else pipeline.plan.sp_group.size()
    tensors = DENOISER_TENSORS / processes + (0 if cache is None else cache.num_kept)
    denoising = int(tensors * tokens * model.hidden_size * pipeline.dtype.itemsize)
    decoder = _pixel_vae(vae)
    frames = decoder.micro_batch_size or num_frames if decoder.decodes_frames else num_frames
    height, width = (min(side, decoder.tile_size or side) for side in image_size)
    last = decoder.last_layer  # [3, C, ...]
    decoding = DECODER_TENSORS * min(frames, num_frames) * height * width * last.shape[1] * last.element_size()
    weights, vae_weights = _num_bytes(model), _num_bytes(vae)
    text = [getattr(pipeline.text_encoder, "encoder", pipeline.text_encoder), pipeline.image_encoder]
    text_weights = sum(map(_num_bytes, text))
    if place.policy == "none":  # in a training, encoders may come when they work
        here = [_num_bytes(part, pipeline.device) for part in (model, vae, *text)]
        return sum(here) + max(text_weights - sum(here[2:]), denoising, vae_weights - here[1] + decoding)
    if place.policy == "block":  # two of them at a time, and the first
        blocks = [_num_bytes(block) for block in model.transformer_blocks()]
        weights += 3 * max(blocks, default=0) - sum(blocks)
    return max(text_weights, weights + denoising, vae_weights + decoding)


def warn_if_short(
    pipeline: Any, batch: int, num_frames: int, image_size: tuple[int, int], guidance_scale: float | None
) -> None:
    """Before a run on a GPU, warn if it needs more memory than there is."""
    if pipeline.device.type != "cuda" or calls_parts(pipeline.scheduler):  # parts: no call stands for a step
        return
    needed = int(MARGIN * estimate(pipeline, batch, num_frames, image_size, guidance_scale))
    available = available_memory(pipeline.device)
    if needed > available:
        logger.warning(
            "this run needs about %.1f GiB, and %.1f GiB are available; it may run out of memory. %s",
            needed / GIB,
            available / GIB,
            advice(pipeline, batch),
        )


def available_memory(device: torch.device) -> float:
    """Bytes for weights and work: what is free, and what this process holds already; infinity where it cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    values = {"/proc/meminfo": "MemAvailable", "/proc/self/status": "VmRSS"}
    try:
        kib = [re.findall(rf"{name}:\s+(\d+) kB", Path(file).read_text())[0] for file, name in values.items()]
    except OSError:  # not Linux
        return math.inf
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    most = limit.read_text().strip() if limit.is_file() else "max"
    return min(1024.0 * sum(map(int, kib)), math.inf if most == "max" else int(most))


@contextmanager
def oom_report(pipeline: Any, batch: int, num_frames: int, image_size: tuple[int, int]) -> Iterator[None]:
    """Turn running out of memory into a `UserError` that names the settings which help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        height, width = image_size
        raise UserError(
            f"out of memory on {pipeline.device} with {batch} videos of {num_frames} frames of {height}x{width}: "
            f"{(str(error) or 'MemoryError').splitlines()[0]} {advice(pipeline, batch)}"
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


def tile_images(vae: nn.Module, size: int) -> None:
    """Let a VAE, or the one of its parts that takes pixels, encode and decode in tiles of `size` pixels.

    Raises:
        UserError: the size is no multiple of a latent cell.
    """
    check_tile_size(size, _pixel_vae(vae).strides[1:])
    _pixel_vae(vae).tile_size = size


def _pixel_vae(vae: nn.Module) -> VideoVAE:
    """The VAE, or the one of its parts, that takes pixels."""
    # the innermost: parts come after what they are parts of
    return [part for part in vae.modules() if isinstance(part, VideoVAE) and part.in_channels == 3][-1]


def _joins_guidance(scheduler: Any) -> bool:
    """Whether guidance calls the model with a doubled batch, and could do with two calls."""
    return not calls_parts(scheduler) and scheduler.guidance.batching == "joint"


def _num_bytes(part: Any, device: torch.device | None = None) -> int:
    """Of the parameters and buffers of a module, or of those on `device`; 0 for what is none."""
    tensors = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else []
    unique = {id(t): t for t in tensors if device is None or t.device.type == device.type}.values()  # tied: once
    return sum(tensor.numel() * tensor.element_size() for tensor in unique)
