"""Sizes to train and sample at: for each resolution name, the shapes it comes in, all of nearly the same area.

A shape is named by its aspect ratio height / width, with two decimals in every table ("0.56", "1.00"). Four kinds of names:

    "144p" ... "1080p", "2k", "4k"     17 ratios from 3:8 to 25:12, the sizes of Open-Sora 1.x
    "256", "512", "1024", "2048", "2880"   40 ratios from 1:4 to 4:1, the sizes of PixArt (arXiv:2310.00426)
    "<N>px", for example "96px"        the area of an N x N square in 17 common ratios, for any N
    "<H>x<W>", for example "240x424"   one size, taken as it is; "480x832,624x624,832x480": one of these

Models take sides that are multiples of VAE x patch, which 240 x 426 is not: `rounded` moves a size to the nearest one.

"9:16" is read in two ways: Open-Sora 1.x means HEIGHT:WIDTH (landscape), Open-Sora 2.0 and everyday language WIDTH:HEIGHT (a
phone held upright). `ratio_of` takes either and its caller must say which.
"""

import math
import re
from functools import cache
from typing import Literal, NamedTuple

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Size = tuple[int, int]  # height, width

# height : width of the "p" tables
_P_RATIOS = (
    (3, 8), (3, 7), (12, 25), (1, 2), (9, 17), (27, 50), (9, 16), (5, 8), (2, 3), (3, 4),
    (1, 1), (4, 3), (3, 2), (16, 9), (17, 9), (2, 1), (25, 12),
)  # fmt: skip
_P_AREAS = {
    "144p": 36_864, "240p": 102_240, "360p": 230_400, "480p": 409_920,
    "720p": 921_600, "1080p": 2_073_600, "2k": 3_686_400, "4k": 8_294_400,
}  # fmt: skip
# PixArt's 1024 table in units of 64 pixels, the wide half; the rest is its mirror
_PIXART_HALF = (
    (8, 32), (8, 31), (8, 30), (8, 29), (9, 28), (9, 27), (9, 26), (10, 25), (10, 24), (11, 23), (11, 22), (11, 21),
    (12, 21), (12, 20), (13, 19), (13, 18), (14, 18), (14, 17), (15, 17), (15, 16),
)  # fmt: skip
_PIXART_SIDES = {"256": 256, "512": 512, "1024": 1024, "2048": 2048, "2880": 2880}
_PIXART_UNMIRRORED = (11, 21)  # PixArt has no 21:11
_SQUARE_RATIOS = (
    (1, 2), (9, 17), (9, 16), (5, 8), (2, 3), (3, 4), (4, 5), (9, 10), (1, 1), (10, 9), (5, 4), (4, 3), (3, 2), (8, 5),
    (16, 9), (17, 9), (2, 1),
)  # fmt: skip
NAMES = (*_P_AREAS, *_PIXART_SIDES)


class Resolution(NamedTuple):
    """A resolution: its nominal area in pixels, and its sizes by ratio, ascending."""

    name: str
    area: int
    sizes: dict[str, Size]  # "0.56" -> (height, width)

    def closest(self, height: float, width: float) -> str:
        """The key whose number is nearest to height / width; of two, the first."""
        return min(self.sizes, key=lambda key: abs(float(key) - height / width))


@cache
def get_resolution(name: str) -> Resolution:
    """The resolution of that name; a `UserError` where there is none."""

    def key(height: int, width: int) -> str:
        return f"{height / width:.2f}"

    if area := _P_AREAS.get(name):
        # Landscape sizes have the height of that area, and the width from the height; others are their mirrors. 144p is
        # truncated to integers, the others are rounded to even ones.
        def side(value: float) -> int:
            return int(value + 1e-9) if name == "144p" else 2 * math.floor(value / 2 + 0.5)

        sizes = {}
        for h, w in _P_RATIOS:
            low, high = min(h, w), max(h, w)
            height = side(math.sqrt(area * low / high))
            width = side(height * high / low)
            sizes[key(h, w)] = (height, width) if h <= w else (width, height)
        return Resolution(name, area, sizes)
    if edge := _PIXART_SIDES.get(name):
        mirrored = [(w, h) for h, w in reversed(_PIXART_HALF) if (h, w) != _PIXART_UNMIRRORED]
        unit = 64 if edge == 2880 else edge // 16  # 2880 / 16 is no multiple of 64: truncated to one
        pixels = {n: n * edge // 16 // unit * unit for n in range(8, 33)}
        ratios = (*_PIXART_HALF, (16, 16), *mirrored)
        return Resolution(name, edge**2, {key(h, w): (pixels[h], pixels[w]) for h, w in ratios})
    if match := re.fullmatch(r"([1-9]\d*)px", name):
        area = int(match[1]) ** 2
        sizes = {
            key(h, w): (round(math.sqrt(area * (h / w))), round(math.sqrt(area / (h / w)))) for h, w in _SQUARE_RATIOS
        }
        return Resolution(name, area, sizes)
    if re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", name):
        written = [(int(h), int(w)) for h, w in (size.split("x") for size in name.split(","))]
        sizes = {key(*size): size for size in sorted(written, key=lambda size: size[0] / size[1])}
        if len(sizes) < len(written):
            raise UserError(f"resolution {name!r}: two of its sizes have the same shape; name each once.")
        return Resolution(name, max(h * w for h, w in written), sizes)
    raise UserError(
        f"resolution {name!r} is unknown.{did_you_mean(name, list(NAMES))} Names: {', '.join(NAMES)}; or '<N>px' for the "
        "area of an N x N square, or 'HEIGHTxWIDTH' for one size, or several of these with commas."
    )


def ratio_of(text: str, *, order: Literal["height:width", "width:height"]) -> float:
    """Height / width of "9:16" or of "0.56" (always height / width); a `UserError` where it is neither."""
    try:
        if ":" in text:
            first, second = (float(part) for part in text.split(":"))
            ratio = first / second if order == "height:width" else second / first
        else:
            ratio = float(text)
        if not 0 < ratio < math.inf:
            raise ValueError
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"aspect ratio {text!r}: write {order.upper()}, such as '9:16', or height / width, such as '0.56'."
        ) from error
    return ratio


def image_size(
    resolution: str,
    aspect_ratio: str,
    *,
    multiple: int = 1,
    order: Literal["height:width", "width:height"] = "height:width",
) -> Size:
    """Height and width of a resolution in the shape nearest to a ratio, moved to multiples of `multiple`.

    `image_size("480p", "9:16")` is (480, 854), landscape: Open-Sora 1.x writes height first. A `UserError` where the resolution or
    the ratio is unknown, or the table has nothing within a tenth of the ratio.
    """
    table, ratio = get_resolution(resolution), ratio_of(aspect_ratio, order=order)
    key = table.closest(ratio, 1)
    if abs(math.log(float(key) / ratio)) > 0.1:
        other = "width:height" if order == "height:width" else "height:width"
        raise UserError(
            f"{resolution} has no shape near {aspect_ratio!r}, read as {order} (height / width = {ratio:.2f}); it has "
            f"{', '.join(table.sizes)}. Did you mean it as {other}?"
        )
    return rounded(table.sizes[key], multiple)


def rounded(size: Size, multiple: int) -> Size:
    """The nearest size whose sides are multiples of `multiple`, at least one of it; a half goes up."""
    height, width = (max(1, math.floor(side / multiple + 0.5)) * multiple for side in size)
    return height, width
