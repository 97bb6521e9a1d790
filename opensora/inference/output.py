"""Sample files: H.264 (mp4), VP9 (webm), GIF, PNG for a single image; contact sheets; and names that are safe for any prompt.

Colour. Videos are 4:2:0, limited range, converted with the BT.709 matrix and tagged BT.709 at every size: some players read
untagged files as BT.601 and others as BT.709. 4:2:0 halves the colour planes, so an odd height or width grows by one repeated
row or column: 4:4:4 would keep the size, but browsers and phones do not play it. GIF and PNG are RGB and keep every size.

Time. mp4 holds any rate exactly. WebM counts milliseconds and GIF hundredths of a second, so there each frame is shown at the
nearest of these moments, and the total duration is right.
"""

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from opensora.utils.errors import UserError

VideoFormat = Literal["mp4", "webm", "gif"]
LONGEST_NAME = 200  # bytes of a given name; file systems take 255 in all
EXTENSIONS = (".mp4", ".webm", ".gif", ".png")
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
FASTEST_GIF = 50  # frames per second: browsers slow down what stays for less than 2/100 s
PALETTE_FRAMES = 8  # of a GIF, evenly picked, that its 256 colours are chosen from
ROW_HEIGHT = 128  # pixels of a row of images in a contact sheet
GAP = 4


class _Codec(NamedTuple):
    """An encoder of PyAV, its options, the container's, and the range of its quality."""

    encoder: str
    options: dict[str, str]
    container: dict[str, str]
    quality: str  # default of "crf"
    worst_quality: int


CODECS = {
    # 17 is visually lossless: a sample is looked at for the model's artefacts, not the encoder's. "faststart" puts the
    # index in front, so that a browser can start before it has the complete file. Without "mbtree": at widths such as 48 and 160
    # it reads memory that nobody wrote (x264 core 165), and the same frames then make different files
    "mp4": _Codec("libx264", {"mbtree": "0"}, {"movflags": "+faststart"}, "17", 51),
    # "b=0" makes crf the only rule of quality; the speed is the fastest that is not meant for live video. "bitexact" leaves
    # out a random number that would make every file another one
    "webm": _Codec(
        "libvpx-vp9", {"b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"}, {"fflags": "+bitexact"}, "18", 63
    ),
}


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
    frames, rate = to_uint8(video), exact_fps(fps)
    if len(frames) == 1:
        path = with_extension(path_without_ext, ".png")
        replace_file(path, Image.fromarray(frames[0]).save)
        return path
    path = with_extension(path_without_ext, f".{save_format}")
    if save_format == "gif":
        if crf is not None:
            raise ValueError("crf has no effect on a GIF.")
        check_rate(save_format, rate)
        replace_file(path, lambda file: _write_gif(frames, file, rate))
        return path
    if save_format not in CODECS:
        raise UserError(f"save_format={save_format!r}: choose mp4, webm or gif.")
    codec = CODECS[save_format]
    quality = codec.quality if crf is None else crf
    if not quality.isdigit() or int(quality) > codec.worst_quality:
        raise UserError(f"crf={quality!r}: {save_format} takes 0 (best) to {codec.worst_quality}.")
    replace_file(path, lambda file: _encode(frames, file, rate, codec, quality))
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


def check_rate(save_format: VideoFormat, fps: float | Fraction) -> None:
    """Raise a `UserError` if the format cannot hold a frame rate."""
    if exact_fps(fps) > FASTEST_GIF and save_format == "gif":
        raise UserError(
            f"save_format='gif' with {float(fps):g} frames per second: browsers show no more than {FASTEST_GIF} of a GIF. "
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
        ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode()
        slug = re.sub(r"[^a-z0-9]+", "-", ascii_text.lower())[:80].strip("-") or "prompt"
        name = f"{slug}-{hashlib.blake2b(f'{index}:{prompt}'.encode(), digest_size=4).hexdigest()}"
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


def save_image_grid(path: Path, clips: Mapping[str, tuple[Tensor, ...]], columns: int = 5) -> Path:
    """Write a contact sheet: of each clip, `columns` frames of every version [3, T, H, W] in [-1, 1], one version per row.

    The first version is the original. A clip with fewer frames than columns shows what it has.
    """
    strips = []
    for name, versions in clips.items():
        rows = [np.concatenate(list(to_uint8(v)), axis=1) for v in shown_frames(versions, columns)]  # [H, columns W, 3]
        strip = Image.fromarray(np.concatenate(rows, axis=0))
        height = ROW_HEIGHT * len(versions)
        strip = strip.resize((round(strip.width * height / strip.height), height), Image.Resampling.LANCZOS)
        ImageDraw.Draw(strip).text((3, 3), name, fill="white", stroke_width=2, stroke_fill="black")
        strips.append(strip)
    grid = Image.new("RGB", (max(s.width for s in strips), sum(s.height + GAP for s in strips)), "white")
    top = 0
    for strip in strips:
        grid.paste(strip, (0, top))
        top += strip.height + GAP
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path, quality=88)  # heeded by JPEG
    return path


def shown_frames(versions: tuple[Tensor, ...], columns: int = 5) -> tuple[Tensor, ...]:
    """The frames of versions [3, T, H, W] that a contact sheet shows, copied, so that the videos can be freed."""
    frames = versions[0].shape[1]
    chosen = np.linspace(0, frames - 1, min(columns, frames)).round().astype(int).tolist()
    return tuple(version[:, chosen] for version in versions)


def _encode(frames: np.ndarray, file: Path, rate: Fraction, codec: _Codec, quality: str) -> None:
    """4:2:0, BT.709, limited range."""
    import av  # here: images are written where there is no PyAV

    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(file, "w", options=codec.container) as container:
        stream = cast(
            av.VideoStream, container.add_stream(codec.encoder, rate=rate, options={**codec.options, "crf": quality})
        )
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(_to_yuv420(pixels), format="yuv420p")
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _write_gif(frames: np.ndarray, file: Path, rate: Fraction) -> None:
    """One palette for all frames, so that still parts stay still; equal frames in a row become one that stays longer."""
    chosen = np.linspace(0, len(frames) - 1, min(PALETTE_FRAMES, len(frames))).round().astype(int)
    palette = Image.fromarray(np.concatenate(list(frames[chosen]))).quantize(256, Image.Quantize.MEDIANCUT)
    images = [Image.fromarray(f).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG) for f in frames]
    ends = [round(100 * (i + 1) / rate) for i in range(len(frames))]  # in 1/100 s
    durations = [10 * (end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]  # in ms, as PIL wants
    images[0].save(file, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False)


def _to_yuv420(pixels: np.ndarray) -> np.ndarray:
    """RGB `pixels [H, W, 3]` uint8, even sizes -> planes Y, Cb, Cr under each other, `[H * 3 / 2, W]` uint8.

    BT.709-6, limited range; colour is averaged over 2 x 2 pixels.
    """
    height, width, _ = pixels.shape
    red, green, blue = (pixels[..., i, None].astype(np.float32) * RGB_TO_YUV[:, i] for i in range(3))
    # not a matrix product, which rounds by where its operands lie in memory: equal frames would make other files
    yuv = red + green + blue + YUV_OFFSET  # [H, W, 3]
    colour = yuv[..., 1:].reshape(height // 2, 2, width // 2, 2, 2).mean(axis=(1, 3))  # [H / 2, W / 2, 2]
    planes = np.concatenate([yuv[..., 0].ravel(), colour[..., 0].ravel(), colour[..., 1].ravel()])
    return planes.round().astype(np.uint8).reshape(height * 3 // 2, width)
