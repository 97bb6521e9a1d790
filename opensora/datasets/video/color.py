"""From a decoded frame to 8-bit RGB that looks right: matrix, range, transparency, square pixels, orientation, HDR.

HDR (PQ or HLG in BT.2020) is tone-mapped to BT.709 for a screen of 203 cd/m2, the level of a white page in HDR (ITU-R
BT.2408): light up to 100 cd/m2 stays in proportion, what is brighter is bent by the curve of ITU-R BT.2390-10, 5.4.1, for
a master of 1000 cd/m2, in the largest of R, G and B so that hues stay. Equations: PQ and HLG from ITU-R BT.2100-2.
"""

import functools
import math
from typing import Any, cast

import numpy as np
from av.buffer import Buffer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from PIL import Image

from opensora.datasets.video.files import BadFile, Decoding, check_pixels
from opensora.datasets.video.images import on_white

BT709, UNSPECIFIED, BT601, BT2020 = 1, 2, 6, 9  # numbers of ISO/IEC 23091-2, as FFmpeg counts
PQ, HLG = 16, 18
HDR_NAMES = {PQ: "PQ", HLG: "HLG"}
FULL_RANGE = 2
# "exact" is within rounding of the equations; "fast" is 1.2/255 too dark on average and takes each chroma sample for four
# pixels, up to 8/255 off at edges, in a sixth of the time
BILINEAR, FULL_CHR_H_INT, ACCURATE_RND = 0x2, 0x2000, 0x40000  # FFmpeg's SWS_ flags; PyAV 17 has no name for the last
SCALERS = {"exact": BILINEAR | FULL_CHR_H_INT | ACCURATE_RND, "fast": BILINEAR}
NEARLY_SQUARE = 0.005  # pixels that differ from squares by less are taken as squares

WHITE_NITS, MASTER_NITS = 203.0, 1000.0
PQ_M1, PQ_M2, PQ_C1, PQ_C2, PQ_C3 = 1305 / 8192, 2523 / 32, 107 / 128, 2413 / 128, 2392 / 128
LUMA_2020 = np.array([0.2627, 0.6780, 0.0593], np.float32)
TO_709 = np.array(  # linear BT.2020 -> linear BT.709, ITU-R BT.2407
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)


def displayed_size(frame: VideoFrame, pixel_aspect: float) -> tuple[int, int]:
    """Height and width as `to_rgb` gives them."""
    height, width = _with_square_pixels(frame, pixel_aspect)
    return (width, height) if _orientation(frame)[0] else (height, width)


def display_matrix(frame: VideoFrame) -> tuple[int, ...] | None:
    """The 9 numbers by which the frame is turned and mirrored to be shown; None: it is shown as it is stored.

    They are `av_display_matrix`'s, row by row: what is at (x, y) is shown at (m0 x + m3 y, m1 x + m4 y) / 2^16.
    """
    try:
        data = cast("Buffer | None", frame.side_data.get("DISPLAYMATRIX"))  # PyAV types the list as one of its items
    except ValueError:  # PyAV does not list what comes with a frame where it has no name for some of it, such as EXIF
        if not frame.rotation:
            return None
        angle = math.radians(frame.rotation)  # counter-clockwise
        cos, sin = round((1 << 16) * math.cos(angle)), round((1 << 16) * math.sin(angle))
        return cos, -sin, 0, sin, cos, 0, 0, 0, 1 << 30
    return None if data is None else tuple(memoryview(data).cast("i"))


def upright(frame: VideoFrame, pixels: np.ndarray) -> np.ndarray:
    """Pixels [H, W, 3] of the stored frame, turned and mirrored as it is displayed."""
    transposed, left_to_right, upside_down = _orientation(frame)
    if transposed:
        pixels = pixels.transpose(1, 0, 2)
    return np.ascontiguousarray(pixels[:: -1 if upside_down else 1, :: -1 if left_to_right else 1])


def to_rgb(path: str, frame: VideoFrame, pixel_aspect: float, decoding: Decoding) -> np.ndarray:
    """[H, W, 3] uint8, the way the frame is displayed; transparency on white. A `BadFile` where it is too large, has no palette, or is
    HDR, which is to be refused."""
    matrix = frame.colorspace
    if matrix == UNSPECIFIED:  # what players assume
        matrix = BT709 if frame.height >= 720 else BT601
    has_alpha = any(component.is_alpha for component in frame.format.components) or frame.format.name == "pal8"
    is_hdr = frame.color_trc in HDR_NAMES
    if is_hdr and decoding.hdr == "refuse":
        raise BadFile(
            f"{path} is HDR ({HDR_NAMES[frame.color_trc]}), and decode['hdr'] is 'refuse'; tone-map it to BT.709, or set "
            "'tonemap'."
        )
    if frame.format.name == "pal8" and not any(memoryview(frame.planes[1])):
        raise BadFile(f"{path} has indexed colours but no palette; re-encode it or remove its row.")
    height, width = _with_square_pixels(frame, pixel_aspect)
    check_pixels(path, width, height)
    rgb = reformat(
        frame,
        height=height,
        width=width,
        # planes of their own are the same numbers as rgb24, and swscale makes them in half the time
        format="rgb48le" if is_hdr else "rgba" if has_alpha else "gbrp" if decoding.colors == "exact" else "rgb24",
        src_colorspace=matrix,
        src_color_range=frame.color_range,
        dst_color_range=FULL_RANGE,
        interpolation=SCALERS[decoding.colors],
        threads=1,
    ).to_ndarray()
    if is_hdr:
        rgb = tone_map(rgb, frame.color_trc)
    elif has_alpha:
        rgb = on_white(Image.fromarray(rgb))
    return upright(frame, rgb)


def reformat(frame: VideoFrame, **settings: Any) -> VideoFrame:
    """PyAV's `VideoFrame.reformat` in a context of its own: PyAV 19 keeps one a thread, which may wait for ever for FFmpeg's threads
    in a worker that is forked later."""
    return VideoReformatter().reformat(frame, **settings)


def _orientation(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """The way nearest to the frame's display matrix: rows and columns are exchanged first (or not), then it is mirrored left to
    right, and upside down."""
    matrix = display_matrix(frame)
    if matrix is None:
        return False, False, False
    xx, xy, _, yx, yy = matrix[:5]  # "xy": how far down is shown what is further right
    if abs(xx) + abs(yy) >= abs(xy) + abs(yx):
        return False, xx < 0, yy < 0
    return True, yx < 0, xy < 0


def _with_square_pixels(frame: VideoFrame, pixel_aspect: float) -> tuple[int, int]:
    """Height and width; the shorter side of a pixel is stretched, so that nothing is lost."""
    height, width = frame.height, frame.width
    if abs(pixel_aspect - 1) < NEARLY_SQUARE or pixel_aspect <= 0:
        return height, width
    return (height, round(width * pixel_aspect)) if pixel_aspect > 1 else (round(height / pixel_aspect), width)


# -------------------------------------------------------------------------------------------------------- HDR


def tone_map(codes: np.ndarray, transfer: int) -> np.ndarray:
    """BT.2020 code values [..., 3] uint16 of full range, in PQ or HLG -> BT.709 [..., 3] uint8."""
    light, grid, bent = _tables(transfer)
    nits = light[codes]  # [..., 3]
    if transfer == HLG:  # the system gamma of a 1000 cd/m2 screen: scene light -> light of the screen
        nits = nits * np.maximum(nits @ LUMA_2020 / MASTER_NITS, 1e-6)[..., None] ** 0.2
    brightest = nits.max(-1)
    nits *= np.interp(np.sqrt(brightest), grid, bent).astype(np.float32)[..., None]
    linear = np.clip(nits @ TO_709.T / WHITE_NITS, 0, 1)
    return np.rint(255 * linear ** (1 / 2.4)).astype(np.uint8)  # the inverse of BT.1886


def pq_to_nits(signal: np.ndarray) -> np.ndarray:
    """PQ in [0, 1] -> cd/m2."""
    root = np.maximum(signal, 0) ** (1 / PQ_M2)
    return 10_000 * (np.maximum(root - PQ_C1, 0) / (PQ_C2 - PQ_C3 * root)) ** (1 / PQ_M1)


def nits_to_pq(nits: np.ndarray) -> np.ndarray:
    """cd/m2 -> PQ in [0, 1]."""
    root = (np.maximum(nits, 0) / 10_000) ** PQ_M1
    return ((PQ_C1 + PQ_C2 * root) / (1 + PQ_C3 * root)) ** PQ_M2


def hlg_to_scene(signal: np.ndarray) -> np.ndarray:
    """HLG in [0, 1] -> light of the scene in [0, 1]."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)


def bend(nits: np.ndarray) -> np.ndarray:
    """The curve from a master's light to that of the screen, BT.2390 with black at 0."""
    top = nits_to_pq(np.array(MASTER_NITS))
    signal = np.minimum(nits_to_pq(nits) / top, 1)
    limit = nits_to_pq(np.array(WHITE_NITS)) / top
    knee = 1.5 * limit - 0.5
    t = np.clip((signal - knee) / (1 - knee), 0, 1)
    spline = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (-2 * t**3 + 3 * t**2) * limit
    return pq_to_nits(np.where(signal < knee, signal, spline) * top)


@functools.lru_cache(maxsize=2)
def _tables(transfer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[65536] float32 of each code: cd/m2 of PQ, and 1000 times the light of the scene of HLG; then roots of cd/m2, up to 10 000,
    and the factor that `bend` is there."""
    signal = np.arange(65536) / 65535
    light = pq_to_nits(signal) if transfer == PQ else MASTER_NITS * hlg_to_scene(signal)
    grid = np.linspace(0, 100, 4096)
    grid[0] = grid[1] / 10
    return light.astype(np.float32), grid, bend(grid**2) / grid**2
