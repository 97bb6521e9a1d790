"""Videos decoded by torchcodec instead of PyAV: the same frames with the same indices, by another library.

Our own `timeline` says which frame is the i-th, and when it is shown, so that a clip does not depend on the backend. torchcodec
turns frames by itself; it neither mirrors, tone-maps, deinterlaces nor stretches pixels, so files that need it are refused.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from opensora.datasets.video.color import HDR_NAMES, NEARLY_SQUARE, is_mirrored
from opensora.datasets.video.files import BadFile, TooFewFrames
from opensora.datasets.video.pyav_clip import decoded
from opensora.datasets.video.timeline import FileKey, Timeline, open_video, pixel_aspect
from opensora.utils.errors import UserError


class TorchcodecClip:
    """A video; see `read_video.Clip`."""

    def __init__(self, file_key: FileKey, timeline: Timeline, video_decoder: Any) -> None:
        self.path, self.timeline = file_key[0], timeline
        self._file_key = file_key
        self.num_frames, self.fps = timeline.num_frames, timeline.fps
        self._video_decoder = video_decoder

    def seconds(self) -> np.ndarray:
        """See `Clip`."""
        return self.timeline.seconds()

    def size(self) -> tuple[int, int]:
        """See `Clip`."""
        height, width = self.read([0])[0].shape[:2]
        return height, width

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """See `Clip`."""
        self._refuse_what_it_cannot()
        try:
            decoder = self._video_decoder(
                self.path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact", device="cpu"
            )
            if indices[-1] >= len(decoder):
                raise TooFewFrames(
                    f"{self.path} has {len(decoder)} frames, but frames {indices[0]} to {indices[-1]} were asked for.",
                    len(decoder),
                )
            return list(decoder.get_frames_at(list(indices)).data.numpy())
        except (RuntimeError, IndexError) as error:  # torchcodec's errors have no class of their own
            raise BadFile(f"{self.path} is damaged ({error}); re-encode it or remove its row.") from error

    def _refuse_what_it_cannot(self) -> None:
        with open_video(self.path) as (_, stream):
            aspect = pixel_aspect(stream)
            transfer = int(stream.codec_context.color_trc)
        if transfer in HDR_NAMES:
            raise BadFile(f"{self.path} is HDR ({HDR_NAMES[transfer]}), and decode['hdr'] is 'refuse'.")
        if abs(aspect - 1) >= NEARLY_SQUARE:
            raise BadFile(
                f"{self.path} has pixels of {aspect:.3f} : 1, which torchcodec leaves so; use backend='pyav'."
            )
        if _is_mirrored(*self._file_key):
            raise BadFile(
                f"{self.path} is stored mirrored, which torchcodec leaves so; use backend='pyav' or re-encode it."
            )


@functools.lru_cache(maxsize=4096)
def _is_mirrored(path: str, size: int, mtime_ns: int) -> bool:
    """Remembered until the file changes, for it takes decoding a frame."""
    with open_video(path) as opened:
        first = next(decoded(*opened), None)
        return first is not None and is_mirrored(first)


def import_decoder() -> Any:
    """Its `VideoDecoder`.

    Raises:
        UserError: torchcodec is not installed, or does not find FFmpeg's libraries.
    """
    try:
        from torchcodec.decoders import VideoDecoder
    except ImportError as error:
        raise UserError(
            "decode: backend='torchcodec' needs the package torchcodec (pip install torchcodec, in the version for your "
            "PyTorch); backend='pyav' needs nothing more."
        ) from error
    except (OSError, RuntimeError) as error:  # it is there, FFmpeg is not
        raise UserError(
            f"decode: torchcodec cannot be loaded ({str(error).splitlines()[0]}); it needs FFmpeg's libraries, as from "
            "`apt install ffmpeg`. backend='pyav' brings its own."
        ) from error
    return VideoDecoder
