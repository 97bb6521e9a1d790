"""The choices about decoding that a config makes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError


@dataclass(frozen=True)
class Decoding:
    """How files are decoded; a dataset's `decode` is a dict of these.

    Args:
        backend: "pyav", or "torchcodec" (to be installed, with FFmpeg's libraries); images are read by PIL.
        hdr: Video in PQ or HLG: "tonemap" it to BT.709, or "refuse" the file.
        interlaced: Interlaced video: "deinterlace" it to one frame per pair of fields, "refuse" the file, or "keep" the combs.
        colors: "exact", or "fast": the conversion of video players, slightly dark (`color.py` has numbers); PyAV only.
    """

    backend: Literal["pyav", "torchcodec"] = "pyav"
    hdr: Literal["tonemap", "refuse"] = "tonemap"
    interlaced: Literal["deinterlace", "refuse", "keep"] = "deinterlace"
    colors: Literal["exact", "fast"] = "exact"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"decode: {name}={getattr(self, name)!r} is not one of {', '.join(choices)}.")
        if self.backend == "torchcodec" and (self.hdr, self.interlaced, self.colors) != ("refuse", "keep", "fast"):
            raise UserError(
                "decode: backend='torchcodec' neither tone-maps nor deinterlaces, and has its own colors; set hdr='refuse', "
                "interlaced='keep' and colors='fast', or backend='pyav'."
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> "Decoding":
        """From a config's dict.

        Raises:
            UserError: an unknown name or choice.
        """
        names = [field.name for field in fields(cls)]
        for name in settings or {}:
            if name not in names:
                raise UserError(f"decode: {name!r} is unknown.{did_you_mean(name, names)} Names: {', '.join(names)}.")
        return cls(**(settings or {}))


_CHOICES = {
    "backend": ("pyav", "torchcodec"),
    "hdr": ("tonemap", "refuse"),
    "interlaced": ("deinterlace", "refuse", "keep"),
    "colors": ("exact", "fast"),
}
DEFAULT = Decoding()
