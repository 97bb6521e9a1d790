"""Images, still or animated, as frames: turned by their EXIF, transparency on white, any mode; truncated files are refused.

PIL reads them, also animated WebP and AVIF, which FFmpeg does not read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from opensora.datasets.video.files import IMAGE_FPS, MAX_PIXELS, BadFile, check_pixels, is_animated


class ImageClip:
    """An image; see `read_video.Clip`. Its pixels are decoded when they are read, its size is in its header."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_frames, self.fps = path, 1, IMAGE_FPS
        self._seconds = np.zeros(1)
        if not is_animated(path):
            return
        durations = []
        with _open_image(path) as file:
            for index in range(getattr(file, "n_frames", 1)):
                file.seek(index)
                file.load()
                durations.append(max(file.info.get("duration", 0), 10) / 1000)  # as browsers do: 0 would be no rate
        self._seconds = np.concatenate([[0], np.cumsum(durations[:-1])])
        self.num_frames = len(durations)
        if len(durations) > 1:
            self.fps = 1 / float(np.median(np.diff(self._seconds)))

    def seconds(self) -> np.ndarray:
        """See `read_video.Clip`."""
        return self._seconds

    def size(self) -> tuple[int, int]:
        """See `read_video.Clip`."""
        with _open_image(self.path) as file:
            width, height = file.size
            if isinstance(file, TiffImageFile):  # some versions of PIL give the size as stored, some as displayed
                width, height = file.tag_v2[ExifTags.Base.ImageWidth], file.tag_v2[ExifTags.Base.ImageLength]
            # PIL decodes a PNG that has no EXIF in front of its pixels, to look behind them; the base class does not
            look_behind = not isinstance(file, PngImageFile) or not _ends_with_pixels(self.path)
            exif = file.getexif() if look_behind else Image.Image.getexif(file)
            turned = exif.get(ExifTags.Base.Orientation, 1) >= 5  # 5 to 8 exchange rows and columns
        return (width, height) if turned else (height, width)

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """See `read_video.Clip`: turned by the EXIF orientation, transparency on white."""
        frames = []
        with _open_image(self.path) as file:
            for index in indices:
                file.seek(index)
                file.load()
                image: Image.Image = ImageOps.exif_transpose(file)
                if image.mode.startswith("I") or image.mode == "F":  # more than 8 bits
                    grey = np.asarray(image)  # [H, W]
                    if grey.dtype.kind == "f" or grey.min() < 0 or grey.max() > 65535:
                        raise ValueError("its values have no known white; save it with 8 or 16 bits")
                    grey = (grey.astype(np.uint32) >> 8).astype(np.uint8)
                    frames.append(np.repeat(grey[..., None], 3, axis=2))
                elif image.has_transparency_data:
                    frames.append(on_white(image.convert("RGBA")))
                else:
                    frames.append(np.array(image.convert("RGB")))
        return frames


def on_white(image: Image.Image) -> np.ndarray:
    """[H, W, 3] uint8 of an RGBA image."""
    white = Image.new("RGBA", image.size, "white")
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


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
def _open_image(path: Path) -> Iterator[Image.Image]:
    """PIL's image; what it cannot read is a `BadFile`."""
    try:
        with Image.open(path) as file:
            check_pixels(path, *file.size)
            yield file
    except BadFile:
        raise
    except Image.DecompressionBombError as error:  # at twice the limit
        raise BadFile(f"{path} has more pixels than the limit of {MAX_PIXELS:,} ({error}); shrink it first.") from error
    # all that PIL raises; RuntimeError is AVIF's
    except (OSError, EOFError, ValueError, SyntaxError, RuntimeError) as error:
        raise BadFile(f"{path} cannot be read as an image ({error}); it is damaged or no image.") from error
