"""Small videos, images and tables, made for one test."""

import csv
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def write_video(tmp_path: Path) -> Callable[..., Path]:
    """`write_video("a.mp4", frames)` -> its path."""

    def write(
        name: str,
        frames: Sequence[np.ndarray],
        *,
        rate: Fraction | int = 25,
        codec: str = "libx264",
        pix_fmt: str = "yuv420p",
        times: Sequence[int] | None = None,  # in units of 1 / rate
        matrix: int = 6,  # BT.601; whether a file is tagged with it is up to `colorspace`
        options: dict[str, str] | None = None,
        **context: int,
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=rate, options=options or {})
            stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], pix_fmt
            stream.codec_context.thread_count = 1
            for key, value in context.items():
                setattr(stream.codec_context, key, value)
            for i, rgb in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
                frame.colorspace = matrix  # PyAV 17 takes BT.2020 from here alone
                frame = frame.reformat(
                    format=pix_fmt, dst_colorspace=matrix, dst_color_range=context.get("color_range", 1)
                )
                frame.pts, frame.time_base = (times or range(len(frames)))[i], 1 / Fraction(rate)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture
def write_image(tmp_path: Path) -> Callable[..., Path]:
    """`write_image("a.png", rgb)` -> its path; further arguments are PIL's."""

    def write(name: str, pixels: np.ndarray, **options: object) -> Path:
        path = tmp_path / name
        Image.fromarray(pixels).save(path, **options)
        return path

    return write


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., Path]:
    """`write_table([{"path": ..., "text": ...}, ...])` -> the path of a CSV."""

    def write(rows: Sequence[dict[str, object]], name: str = "clips.csv") -> Path:
        path = tmp_path / name
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write
