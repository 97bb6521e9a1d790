"""What counts as a video and what as an image, how files are decoded, and the errors for what files do not give.

Every error about one file is a `BadFile`: the loader may put another sample in its place (`dataloader.py`). What is wrong
with a table or a setting is a plain `UserError`, which always ends a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

VIDEO_EXTENSIONS = (
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".wmv", ".flv", ".3gp", ".gif", ".apng",
)  # fmt: skip
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".avifs")
MAYBE_MOVING = (".webp", ".avif", ".avifs")
MAX_PIXELS = 89_478_485  # of an image or a frame: Pillow's limit, 256 MiB of 24-bit RGB
IMAGE_FPS = 120.0  # the fps that Open-Sora's models get for images


class BadFile(UserError):
    """A file that cannot be read, or is not what its table says; the message names it."""


class TooFewFrames(BadFile):
    """A clip is shorter than was asked for; `available` is what it has."""

    def __init__(self, message: str, available: int) -> None:
        super().__init__(message)
        self.available = available

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.available)


@dataclass(frozen=True)
class BadFiles:
    """What to do with samples whose file cannot be read.

    Args:
        policy: "substitute" another sample of the same size and length, or raise the "error".
        max_share: The share of bad samples above which a run ends, in each process; of the first 100 at least.
        seed: Of the choice of stand-ins.
    """

    policy: Literal["substitute", "error"] = "substitute"
    max_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in ("substitute", "error"):
            raise UserError(f"bad_files={self.policy!r} is not one of substitute, error.")
        if not 0 <= self.max_share <= 1:
            raise UserError(f"max_bad_share={self.max_share} is no share: give a number from 0 to 1, such as 0.05.")

    @property
    def at_start(self) -> float:
        """The share of a table's rows that may be left out before training because their file is missing or broken."""
        return self.max_share if self.policy == "substitute" else 0.0


def is_image(path: str | Path) -> bool:
    """Whether a file is an image of one frame: by its extension, unless it is an animated WebP or AVIF."""
    return Path(path).suffix.lower() in IMAGE_EXTENSIONS and not is_animated(path)


def is_animated(path: str | Path) -> bool:
    """Whether a WebP or AVIF file has more than one frame, by its first bytes; False where there is no such file."""
    if Path(path).suffix.lower() not in MAYBE_MOVING:
        return False
    try:
        with Path(path).open("rb") as file:
            head = file.read(32)
    except OSError:
        return False
    if head[:4] == b"RIFF":
        return head[12:16] == b"VP8X" and len(head) > 20 and bool(head[20] & 0b10)  # the flag "animation"
    return head[4:12] == b"ftypavis"


def file_stat_key(path: str | Path) -> tuple[str, int, int]:
    """Path, bytes and time of change: what is known of a file holds as long as this. A `BadFile` where it is not there, or empty."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.") from error
    if stat.st_size == 0:
        raise BadFile(f"{path} is empty (0 bytes); fetch it again or remove its row.")
    return str(path), stat.st_size, stat.st_mtime_ns


def check_pixels(path: str | Path, width: int, height: int) -> None:
    """Raise a `BadFile` for an image or video whose decoded frames may fill the memory, though the file is small."""
    if width * height > MAX_PIXELS:
        raise BadFile(f"{path} has {width} x {height} pixels, more than the limit of {MAX_PIXELS:,}; shrink it first.")


def refuse_unlisted(error: OSError) -> None:
    """For `os.walk`, which passes over what it cannot list without a word: raises a `UserError`."""
    raise UserError(f"{error.filename} cannot be listed ({error.strerror}); its files would be missing.") from error


def too_few(path: str | Path, indices: Sequence[int], available: int) -> TooFewFrames:
    """The error for frames beyond a file's end."""
    has = "is an image;" if is_image(path) else f"has {available} frames, but"
    return TooFewFrames(f"{path} {has} frames {indices[0]} to {indices[-1]} were asked for.", available)


@dataclass(frozen=True)
class Decoding:
    """How files are decoded; a dataset's `decode` is a dict of these.

    Args:
        backend: "pyav", the only one.
        hdr: Video in PQ or HLG: "tonemap" it to BT.709, or "refuse" the file.
        interlaced: Interlaced video: "deinterlace" it to one frame per pair of fields, "refuse" the file, or "keep" the combs.
        colors: "exact", or "fast": the conversion of video players, slightly dark (`color.py` has numbers).
    """

    backend: Literal["pyav"] = "pyav"
    hdr: Literal["tonemap", "refuse"] = "tonemap"
    interlaced: Literal["deinterlace", "refuse", "keep"] = "deinterlace"
    colors: Literal["exact", "fast"] = "exact"

    def __post_init__(self) -> None:
        if self.backend == "torchcodec":
            raise UserError(
                "decode: backend='torchcodec' is gone, as it was no faster than PyAV (docs/explanation/benchmarks/decode.md); leave it out, "
                "and keep the other names."
            )
        for name, literal in get_type_hints(Decoding).items():
            if getattr(self, name) not in (choices := get_args(literal)):
                raise UserError(f"decode: {name}={getattr(self, name)!r} is not one of {', '.join(choices)}.")

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> "Decoding":
        """From a config's dict; a `UserError` for an unknown name or choice."""
        names = [field.name for field in fields(cls)]
        for name in settings or {}:
            if name not in names:
                raise UserError(f"decode: {name!r} is unknown.{did_you_mean(name, names)} Names: {', '.join(names)}.")
        return cls(**(settings or {}))


DEFAULT = Decoding()
