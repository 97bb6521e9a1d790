"""Writing frames as files: H.264 (mp4), VP9 (webm), GIF, and PNG for a single picture.

Colour. Videos are 4:2:0, limited range, converted with the BT.709 matrix and tagged BT.709 at every size. Untagged files
are read as BT.601 by some players and as BT.709 by others, by size; a tag ends the guessing. 4:2:0 halves the colour
planes, so an odd height or width grows by one repeated row or column: 4:4:4 would keep the size, but browsers and phones
do not play it. GIF and PNG are RGB and keep every size.

Time. mp4 holds any rate exactly. WebM counts milliseconds and GIF hundredths of a second, so there each frame is shown
at the nearest of these moments, and the whole lasts as long as it should.
"""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
from PIL import Image

from opensora.utils.errors import UserError

VideoFormat = Literal["mp4", "webm", "gif"]
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


class Codec(NamedTuple):
    """How PyAV is told to encode: the encoder, its options, the container's, and the values that quality may have."""

    encoder: str
    options: dict[str, str]
    container: dict[str, str]
    quality: str  # default of "crf"
    worst_quality: int


CODECS = {
    # 17 is visually lossless: a sample is looked at for the model's artefacts, not the encoder's. "faststart" puts the
    # index in front, so that a browser can start before it has the whole file. Without "mbtree": at widths such as 48 and 160
    # it reads memory that nobody wrote (x264 core 165), and the same frames then make different files
    "mp4": Codec("libx264", {"mbtree": "0"}, {"movflags": "+faststart"}, "17", 51),
    # "b=0" makes crf the only rule of quality; the speed is the fastest that is not meant for live video. "bitexact" leaves
    # out a random number that would make every file another one
    "webm": Codec(
        "libvpx-vp9", {"b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"}, {"fflags": "+bitexact"}, "18", 63
    ),
}


def write_video(frames: np.ndarray, file: Path, rate: Fraction, save_format: str, crf: str | None = None) -> None:
    """Write `frames [T, H, W, 3]` uint8 RGB into `file`, whose extension is the format's.

    Args:
        frames: T pictures.
        file: where to.
        rate: frames per second.
        save_format: "mp4", "webm" or "gif".
        crf: quality of mp4 (0 to 51) and webm (0 to 63), 0 being the best; None: the format's own.

    Raises:
        UserError: a GIF faster than browsers show it.
    """
    _writer(save_format, crf)(frames, file, rate)


def write_png(frame: np.ndarray, file: Path) -> None:
    """Write one picture [H, W, 3] uint8."""
    Image.fromarray(frame).save(file)


def _writer(save_format: str, crf: str | None) -> Callable[[np.ndarray, Path, Fraction], None]:
    if save_format == "gif":
        if crf is not None:
            raise ValueError("crf has no effect on a GIF.")
        return _write_gif
    if save_format not in CODECS:
        raise UserError(f"save_format={save_format!r}: choose mp4, webm or gif.")
    codec = CODECS[save_format]
    quality = codec.quality if crf is None else crf
    if not quality.isdigit() or int(quality) > codec.worst_quality:
        raise UserError(f"crf={quality!r}: {save_format} takes 0 (best) to {codec.worst_quality}.")
    return lambda frames, file, rate: _encode(frames, file, rate, codec, quality)


def _encode(frames: np.ndarray, file: Path, rate: Fraction, codec: Codec, quality: str) -> None:
    """4:2:0, BT.709, limited range."""
    import av  # here: pictures are written where there is no PyAV

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
            frame = av.VideoFrame.from_ndarray(to_yuv420(pixels), format="yuv420p")
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _write_gif(frames: np.ndarray, file: Path, rate: Fraction) -> None:
    """One palette for all frames, so that still parts stay still; equal frames in a row become one that stays longer."""
    if rate > FASTEST_GIF:
        raise UserError(
            f"a GIF of {float(rate):g} frames per second: browsers show no more than {FASTEST_GIF}. "
            "Lower --save-fps, or choose --save-format webm or mp4."
        )
    chosen = np.linspace(0, len(frames) - 1, min(PALETTE_FRAMES, len(frames))).round().astype(int)
    palette = Image.fromarray(np.concatenate(list(frames[chosen]))).quantize(256, Image.Quantize.MEDIANCUT)
    pictures = [Image.fromarray(f).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG) for f in frames]
    ends = [round(100 * (i + 1) / rate) for i in range(len(frames))]  # in 1/100 s
    durations = [10 * (end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]  # in ms, as PIL wants
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=False)


def to_yuv420(pixels: np.ndarray) -> np.ndarray:
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
