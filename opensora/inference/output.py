"""Writing samples: their files, complete or not at all, and names that are safe whatever the prompt is.

Colours, odd sizes and frame rates of the formats: `video_files.py`. What is written beside a sample so that it can be
made again: `manifest.py`.
"""

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opensora.inference.video_files import FASTEST_GIF, VideoFormat, write_png, write_video
from opensora.utils.errors import UserError

LONGEST_NAME = 200  # bytes of a given name; file systems take 255 of the whole
EXTENSIONS = (".mp4", ".webm", ".gif", ".png")  # of all that this module writes


def save_sample(
    video: Tensor,
    path_without_ext: str | Path,
    fps: float | Fraction = 24,
    *,
    save_format: VideoFormat = "mp4",
    crf: str | None = None,
) -> Path:
    """Write `video [3, T, H, W]`, floating point in [-1, 1]; returns the file's path.

    A video of one frame becomes a .png, whatever the format. The file appears complete or not at all; an older one of
    that name is replaced. mp4 and webm have even sides: an odd one grows by a repeated row or column.

    Args:
        video: the sample.
        path_without_ext: where to; the format's extension is appended.
        fps: frames per second of the file.
        save_format: "mp4", "webm" or "gif".
        crf: quality of mp4 (0 to 51) and webm (0 to 63), 0 being the best; None: visually lossless.

    Raises:
        ValueError: see `to_uint8`.
        UserError: the format cannot hold this frame rate.
    """
    frames = to_uint8(video)
    still = len(frames) == 1
    path = with_extension(path_without_ext, ".png" if still else f".{save_format}")
    rate = exact_fps(fps)

    def write(file: Path) -> None:
        if still:
            write_png(frames[0], file)
        else:
            write_video(frames, file, rate, save_format, crf)

    replace_file(path, write)
    return path


def to_uint8(video: Tensor) -> np.ndarray:
    """`[3, T, H, W]` floating point in [-1, 1] -> `[T, H, W, 3]` uint8, clamped and rounded to nearest.

    Raises:
        ValueError: another shape, an integer dtype (whose range would be a guess), or a value that is not finite.
    """
    if video.ndim != 4 or video.shape[0] != 3 or video.numel() == 0:
        raise ValueError(f"video {tuple(video.shape)}: expected [3, T, H, W] with at least one frame.")
    if not video.is_floating_point():
        raise ValueError(f"video of dtype {video.dtype}: expected floating point in [-1, 1].")
    if not video.isfinite().all():
        raise ValueError("video holds values that are not finite; they would be saved as black.")
    pixels = (video.detach().float().clamp(-1, 1) + 1) * 127.5
    return pixels.round().to(torch.uint8).permute(1, 2, 3, 0).cpu().contiguous().numpy()  # [T, H, W, 3]


def exact_fps(fps: float | Fraction) -> Fraction:
    """The frame rate that a decimal number stands for: 23.976 -> 24000/1001, 8.0 -> 8, 8 / 3 -> 8/3."""
    value = Fraction(fps)
    if value < Fraction(1, 1000):
        raise UserError(f"fps={fps}: a frame rate must be positive, at least 0.001.")
    # NTSC rates are written with 2 or 3 decimals: 23.98, 29.97, 59.94 are within 2 parts in 10,000
    ntsc = Fraction(round(value * 1001 / 1000) * 1000, 1001)
    if value.denominator != 1 and abs(ntsc / value - 1) < Fraction(2, 10_000):
        return ntsc
    return value.limit_denominator(1001)


def check_rate(save_format: VideoFormat, fps: float) -> None:
    """See that a format can hold a frame rate, before there is anything to be written.

    Raises:
        UserError: it cannot.
    """
    if exact_fps(fps) > FASTEST_GIF and save_format == "gif":
        raise UserError(
            f"save_format='gif' with {fps:g} frames per second: browsers show no more than {FASTEST_GIF} of a GIF. "
            "Lower --save-fps, or choose --save-format webm or mp4."
        )


def with_extension(path_without_ext: str | Path, extension: str) -> Path:
    """Append `extension`. Unlike `Path.with_suffix`, a dot in the name ("v1.0") cuts nothing off."""
    path = Path(path_without_ext)
    return path.with_name(path.name + extension)


def sample_file_name(
    prompt: str,
    index: int,
    sample_index: int = 0,
    *,
    num_sample: int = 1,
    sample_name: str | None = None,
    prompt_as_path: bool = False,
) -> str:
    """The name, without extension, of a prompt's sample: `sample_0003`, `sample_0003-1` if there are several of one.

    Args:
        prompt: the prompt.
        index: its index in the complete list.
        sample_index, num_sample: which of how many samples of this prompt.
        sample_name: takes the place of the word "sample".
        prompt_as_path: name it after the prompt: at most 80 safe characters and a hash of index and prompt, so
            that any two prompts, or the same prompt twice, have different names.
    """
    if prompt_as_path:
        name = f"{_slug(prompt)}-{hashlib.blake2b(f'{index}:{prompt}'.encode(), digest_size=4).hexdigest()}"
    else:
        prefix = "sample" if sample_name is None else sample_name
        is_name = re.fullmatch(r"[^/\\\0-\x1f]{1,100}", prefix) and not prefix.startswith(".")
        if not is_name or len(prefix.encode()) > LONGEST_NAME:
            raise UserError(
                f"sample_name={prefix!r}: use 1 to 100 characters (at most {LONGEST_NAME} bytes), no slash, no dot in front."
            )
        name = f"{prefix}_{index:04d}"
    return f"{name}-{sample_index}" if num_sample > 1 else name


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file of the same folder and extension, then give it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _slug(prompt: str, length: int = 80) -> str:
    ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text.lower())[:length].strip("-") or "prompt"
