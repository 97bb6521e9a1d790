"""Writing samples: a video or picture, and beside it a JSON file ("sidecar") that says how to make it again.

Colour. Videos are H.264, 4:2:0, limited range, converted with the BT.709 matrix and tagged BT.709 at every size.
Untagged files are read as BT.601 by some players and as BT.709 by others, by size; a tag ends the guessing.
4:2:0 halves the colour planes, so an odd height or width grows by one repeated row or column: 4:4:4 would keep the
size, but browsers and phones do not play it. The sidecar holds the size that was asked for.

Nothing half-written. A file is written under a temporary name and renamed when complete. The sidecar comes first, so
a finished sample is one that has both files; a sample without its sidecar was not written by this module.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation
from PIL import Image
from torch import Tensor

import opensora
from opensora.utils.errors import UserError

# fields of the config that say which samples are made and where they go, but not what a sample looks like
NOT_OF_A_SAMPLE = {
    "prompt",
    "prompt_path",
    "start_index",
    "end_index",
    "num_sample",
    "batch_size",
    "save_dir",
    "sample_name",
    "prompt_as_path",
    "verbose",
}
CRF = "17"  # visually lossless: a sample is looked at for the model's artefacts, not the encoder's


def save_sample(video: Tensor, path_without_ext: str | Path, fps: float | Fraction = 24) -> Path:
    """Write `video [3, T, H, W]`, floating point in [-1, 1], as .mp4, or as .png when T == 1; returns the file's path.

    The file appears complete or not at all; an older one of that name is replaced. See the module's docstring for
    colours and odd sizes.
    """
    frames = to_uint8(video)
    still = len(frames) == 1
    path = with_extension(path_without_ext, ".png" if still else ".mp4")
    rate = exact_fps(fps)

    def write(file: Path) -> None:
        if still:
            Image.fromarray(frames[0]).save(file)
        else:
            _write_mp4(frames, file, rate)

    _replace(path, write)
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
    """The frame rate that a decimal number stands for: 23.976 -> 24000/1001, 8.0 -> 8, 2.6667 -> 8/3."""
    value = Fraction(fps)
    if value <= 0:
        raise UserError(f"fps={fps}: a frame rate must be positive.")
    # NTSC rates are written with 2 or 3 decimals: 23.98, 29.97, 59.94 are within 2 parts in 10,000
    ntsc = Fraction(round(value * 1001 / 1000) * 1000, 1001)
    if value.denominator != 1 and abs(ntsc / value - 1) < Fraction(2, 10_000):
        return ntsc
    return value.limit_denominator(1001)


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
        if not re.fullmatch(r"[^/\\\0-\x1f]{1,100}", prefix) or prefix.startswith("."):
            raise UserError(f"sample_name={prefix!r}: use 1 to 100 characters, no slash, no dot in front.")
        name = f"{prefix}_{index:04d}"
    return f"{name}-{sample_index}" if num_sample > 1 else name


def sidecar(
    config: Mapping[str, Any],
    *,
    prompt: str,
    prompt_index: int,
    sample_index: int,
    save_fps: float,
    checkpoint: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What the sidecar of one sample holds, as plain JSON values.

    Args:
        config: the resolved config; its `seed`, `image_size`, `num_frames` and `fps` are repeated on top.
        prompt, prompt_index, sample_index: with the config's seed they fix the noise.
        save_fps: frame rate of the file (`fps` is the one that the model was told).
        checkpoint: path and what its manifest says; None = random weights.
    """
    record = {
        "prompt": prompt,
        "prompt_index": prompt_index,
        "sample_index": sample_index,
        "seed": config["seed"],
        "image_size": config["image_size"],
        "num_frames": config["num_frames"],
        "fps": config["fps"],
        "save_fps": str(exact_fps(save_fps)),
        "checkpoint": checkpoint,
        "config": dict(config),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    return json.loads(json.dumps(record, default=str))  # tuples become lists: what a reader of the file gets


def write_sidecar(record: Mapping[str, Any], path_without_ext: str | Path) -> Path:
    """Write `record` as `<path>.json`, complete or not at all."""
    path = with_extension(path_without_ext, ".json")
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    _replace(path, lambda file: file.write_text(text, encoding="utf-8"))
    return path


def already_made(path_without_ext: str | Path, record: Mapping[str, Any]) -> bool:
    """True when a finished sample of that name was made with the settings of `record`, False when there is none.

    Versions and commit are not compared; a checkpoint's path and step are.

    Raises:
        UserError: the name is taken by something else. A sample is never overwritten.
    """
    taken = [path for ext in (".mp4", ".png") if (path := with_extension(path_without_ext, ext)).exists()]
    if not taken:
        return False
    path = with_extension(path_without_ext, ".json")
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        differs = [key for key, value in _settings(record).items() if _settings(old).get(key) != value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{taken[0]} exists, but {path.name} beside it does not tell how it was made. "
            "Choose another save_dir or delete the file."
        ) from None
    if differs:
        raise UserError(
            f"{taken[0]} exists and was made with other settings ({', '.join(sorted(differs))}). "
            "Choose another save_dir or sample_name, or delete the file."
        )
    return True


def versions() -> dict[str, str]:
    """Versions of what decides a sample's values."""
    libraries = {name: version(name) for name in ("torch", "diffusers", "transformers")}
    return {"opensora": opensora.__version__, "python": platform.python_version(), **libraries}


def git_commit() -> str | None:
    """The commit of this source tree, with "-dirty" if tracked files differ from it; None outside a checkout."""
    root = Path(opensora.__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        if Path(git("rev-parse", "--show-toplevel")) != root:  # installed inside another project's checkout
            return None
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    return None


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a sidecar that decide what its sample looks like, the config's under their own names."""
    top = {key: value for key, value in record.items() if key not in ("config", "versions", "git_commit")}
    config = {key: value for key, value in record["config"].items() if key not in NOT_OF_A_SAMPLE}
    return config | top


def _slug(prompt: str, length: int = 80) -> str:
    ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text.lower())[:length].strip("-") or "prompt"


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file of the same folder and extension, then give it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_mp4(frames: np.ndarray, file: Path, rate: Fraction) -> None:
    """`frames [T, H, W, 3]` uint8 -> H.264, 4:2:0, BT.709."""
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    # "faststart" puts the index in front, so that a browser can start before it has the whole file
    with av.open(file, "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": CRF})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        codec = stream.codec_context
        codec.colorspace, codec.color_range = Colorspace.ITU709, ColorRange.MPEG
        codec.color_primaries, codec.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        for i, pixels in enumerate(frames):
            frame = _to_yuv(pixels)
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _to_yuv(pixels: np.ndarray) -> av.VideoFrame:
    """`pixels [H, W, 3]` uint8 -> a 4:2:0 frame in BT.709, limited range; colour planes are averaged 2 x 2."""
    return av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
        format="yuv420p",
        src_colorspace=Colorspace.ITU709,
        dst_colorspace=Colorspace.ITU709,
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange.MPEG,
        dst_color_trc=ColorTrc.BT709,
        dst_color_primaries=ColorPrimaries.BT709,
        interpolation=Interpolation.AREA
        | Interpolation.ACCURATE_RND
        | Interpolation.FULL_CHR_H_INT
        | Interpolation.FULL_CHR_H_INP,
    )
