"""Images, still or moving, as frames: turned by their EXIF, transparency on white, any mode; cut-off files are refused.

PIL reads them, also moving WebP and AVIF, which FFmpeg does not read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from opensora.datasets.video.files import IMAGE_FPS, BadFile


class StillImage:
    """An image; its pixels are decoded when they are read, its size is in its header."""

    num_frames, fps = 1, IMAGE_FPS

    def __init__(self, path: Path) -> None:
        self.path = path

    def seconds(self) -> np.ndarray:
        """See `read_video.Clip`."""
        return np.zeros(1)

    def size(self) -> tuple[int, int]:
        """See `read_video.Clip`."""
        return image_size_of(self.path)

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """See `read_video.Clip`."""
        return [read_image(self.path) for _ in indices]


class AnimatedImage:
    """An image of several frames."""

    def __init__(self, path: Path) -> None:
        self.path, self._seconds = path, frame_starts(path)
        steps = np.diff(self._seconds)
        self.num_frames, self.fps = len(self._seconds), 1 / float(np.median(steps)) if len(steps) else IMAGE_FPS

    def seconds(self) -> np.ndarray:
        """See `read_video.Clip`."""
        return self._seconds

    def size(self) -> tuple[int, int]:
        """See `read_video.Clip`."""
        return image_size_of(self.path)

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """See `read_video.Clip`."""
        return read_frames_of_image(self.path, indices)


def read_image(path: Path) -> np.ndarray:
    """[H, W, 3] uint8, turned by its EXIF orientation, transparency on white."""
    with open_image(path) as file:
        return _pixels(file)


def read_frames_of_image(path: Path, indices: Sequence[int]) -> list[np.ndarray]:
    """Frames of an animated image, in ascending order: [H, W, 3] uint8 each."""
    frames = []
    with open_image(path) as file:
        for index in indices:
            file.seek(index)
            frames.append(_pixels(file))
    return frames


def frame_starts(path: Path) -> np.ndarray:
    """[N] float64, seconds at which the frames of an animated image begin."""
    durations = []
    with open_image(path) as file:
        for index in range(getattr(file, "n_frames", 1)):
            file.seek(index)
            file.load()
            durations.append(max(file.info.get("duration", 0), 10) / 1000)  # as browsers do: 0 would be no rate at all
    return np.concatenate([[0], np.cumsum(durations[:-1])])


def _pixels(file: Image.Image) -> np.ndarray:
    file.load()
    image: Image.Image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I") or image.mode == "F":  # more than 8 bits
        return _from_16_bits(np.asarray(image))
    if image.has_transparency_data:
        return on_white(image.convert("RGBA"))
    return np.array(image.convert("RGB"))


def on_white(image: Image.Image) -> np.ndarray:
    """[H, W, 3] uint8 of an RGBA image."""
    white = Image.new("RGBA", image.size, "white")
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


def _from_16_bits(grey: np.ndarray) -> np.ndarray:
    """[H, W] -> [H, W, 3] uint8."""
    if grey.dtype.kind == "f" or grey.min() < 0 or grey.max() > 65535:
        raise BadFile("its numbers have no known white; save it with 8 or 16 bits")
    return np.repeat((grey.astype(np.uint32) >> 8).astype(np.uint8)[..., None], 3, axis=2)


def image_size_of(path: Path) -> tuple[int, int]:
    """Height and width as `read_image` returns them, from the file's header: the pixels are decoded when they are read."""
    with open_image(path) as file:
        width, height = file.size
        if isinstance(file, TiffImageFile):  # some versions of PIL give the size as stored, some as displayed
            width, height = file.tag_v2[ExifTags.Base.ImageWidth], file.tag_v2[ExifTags.Base.ImageLength]
        # PIL decodes a PNG that has no EXIF in front of its pixels, to look behind them; the base class does not
        look_behind = not isinstance(file, PngImageFile) or not _ends_with_pixels(path)
        exif = file.getexif() if look_behind else Image.Image.getexif(file)
        turned = exif.get(ExifTags.Base.Orientation, 1) >= 5  # 5 to 8 exchange rows and columns
    return (width, height) if turned else (height, width)


def _ends_with_pixels(path: Path) -> bool:
    """Whether no metadata follow the pixels of a PNG, going from chunk to chunk by their lengths."""
    kinds = []
    with path.open("rb") as file:
        file.seek(8)  # signature
        while len(head := file.read(8)) == 8:
            kinds.append(head[4:])
            file.seek(int.from_bytes(head[:4], "big") + 4, 1)  # data and checksum
    behind = kinds[kinds.index(b"IDAT") :] if b"IDAT" in kinds else []
    return not {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}.intersection(behind)


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """PIL's image; what it cannot read is a `BadFile`."""
    try:
        with Image.open(path) as file:
            yield file
    # all that PIL raises; RuntimeError is AVIF's
    except (OSError, EOFError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError) as error:
        raise BadFile(f"{path} cannot be read as an image ({error}); it is damaged or no image.") from error
