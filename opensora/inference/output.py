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
import re
import unicodedata
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opensora.utils.ckpt import MANIFEST
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
    "device",
}
OF_A_SAMPLE = {
    "prompt",
    "prompt_index",
    "sample_index",
    "seed",
    "image_size",
    "num_frames",
    "fps",
    "save_fps",
    "checkpoint",
}
BT709, LIMITED = 1, 1  # code points of H.264 (ITU-T H.273): primaries, transfer and matrix; 16..235
LUMA = np.array([0.2126, 0.7152, 0.0722])  # BT.709-6, 3.2
RGB_TO_YUV = np.stack(
    [
        LUMA * 219 / 255,
        (np.array([0, 0, 1]) - LUMA) / (2 * (1 - LUMA[2])) * 224 / 255,
        (np.array([1, 0, 0]) - LUMA) / (2 * (1 - LUMA[0])) * 224 / 255,
    ]
).astype(np.float32)
YUV_OFFSET = np.array([16, 128, 128], dtype=np.float32)
CRF = "17"  # visually lossless: a sample is looked at for the model's artefacts, not the encoder's


def save_sample(video: Tensor, path_without_ext: str | Path, fps: float | Fraction = 24, *, crf: str = CRF) -> Path:
    """Write `video [3, T, H, W]`, floating point in [-1, 1], as .mp4, or as .png when T == 1; returns the file's path.

    The file appears complete or not at all; an older one of that name is replaced. See the module's docstring for
    colours and odd sizes. `crf` is x264's quality of a video, 0 (lossless) to 51.
    """
    frames = to_uint8(video)
    still = len(frames) == 1
    path = with_extension(path_without_ext, ".png" if still else ".mp4")
    rate = exact_fps(fps)

    def write(file: Path) -> None:
        if still:
            Image.fromarray(frames[0]).save(file)
        else:
            _write_mp4(frames, file, rate, crf)

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
    """The frame rate that a decimal number stands for: 23.976 -> 24000/1001, 8.0 -> 8, 8 / 3 -> 8/3."""
    value = Fraction(fps)
    if value < Fraction(1, 1000):
        raise UserError(f"fps={fps}: a frame rate must be positive, at least 0.001.")
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
    made_with: Mapping[str, Any],
) -> dict[str, Any]:
    """What the sidecar of one sample holds, as plain JSON values.

    Args:
        config: the resolved config; its `seed`, `image_size`, `num_frames` and `fps` are repeated on top.
        prompt, prompt_index, sample_index: with the config's seed they fix the noise.
        save_fps: frame rate of the file (`fps` is the one that the model was told).
        checkpoint: what `describe_checkpoint` says.
        made_with: what `opensora.utils.run.environment` says: versions, commit, command.
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
        **made_with,
    }
    return json.loads(json.dumps(record))  # tuples become lists: what a reader of the file gets


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


def describe_checkpoint(path: str | Path | None) -> dict[str, Any] | None:
    """The weights that a config names: path, time of change (UTC), and training step and commit where they are known.

    The time tells a checkpoint from a later one of the same name.
    """
    if path is None:
        return None
    place = Path(path)
    files = [file for file in [place, *place.rglob("*")] if file.is_file()]
    changed = max((file.stat().st_mtime for file in files), default=None)
    manifest = json.loads((place / MANIFEST).read_text()) if (place / MANIFEST).is_file() else {}
    return {
        "path": str(path),
        "changed": None
        if changed is None
        else datetime.fromtimestamp(changed, timezone.utc).isoformat(timespec="seconds"),
        "step": manifest.get("step"),
        "git_commit": manifest.get("git_commit"),
    }


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a sidecar that decide what its sample looks like, the config's under their own names."""
    top = {key: value for key, value in record.items() if key in OF_A_SAMPLE}
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


def _write_mp4(frames: np.ndarray, file: Path, rate: Fraction, crf: str) -> None:
    """`frames [T, H, W, 3]` uint8 -> H.264, 4:2:0, BT.709."""
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    # "faststart" puts the index in front, so that a browser can start before it has the whole file
    with av.open(file, "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": crf})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        codec.color_range = LIMITED
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(to_yuv420(pixels), format="yuv420p")
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def to_yuv420(pixels: np.ndarray) -> np.ndarray:
    """RGB `pixels [H, W, 3]` uint8, even sizes -> planes Y, Cb, Cr under each other, `[H * 3 / 2, W]` uint8.

    BT.709-6, limited range; colour is averaged over 2 x 2 pixels.
    """
    height, width, _ = pixels.shape
    yuv = pixels.astype(np.float32) @ RGB_TO_YUV.T + YUV_OFFSET  # [H, W, 3]
    colour = yuv[..., 1:].reshape(height // 2, 2, width // 2, 2, 2).mean(axis=(1, 3))  # [H / 2, W / 2, 2]
    planes = np.concatenate([yuv[..., 0].ravel(), colour[..., 0].ravel(), colour[..., 1].ravel()])
    return planes.round().astype(np.uint8).reshape(height * 3 // 2, width)
