"""Which parts of a video become clips: scenes that are long enough, and no longer than they may be."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np

from opensora.utils.errors import UserError
from opensora.utils.folders import parse_json

TIMECODE = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


@dataclass(frozen=True)
class Rules:
    """How scenes become clips.

    Args:
        min_seconds: Scenes that are shorter are left out.
        max_seconds: Scenes that are longer are dealt with by `longer`; None = they stay.
        longer: "split" into equal parts, which loses nothing; "truncate": the first `max_seconds`, as Open-Sora does.
        target_fps: The rate that clips are brought down to, by leaving frames out; slower videos keep theirs.
        shorter_side: Pixels that the shorter side is brought down to; smaller videos keep theirs.
        how: "encode" to H.264, exact to the frame; "copy" the stream, without loss and fast, from the first keyframe in a
            scene on; "auto": copy where a scene begins with a keyframe, else encode.
        crf: Quality of "encode", 0 (best) to 51.
    """

    min_seconds: float = 2.0
    max_seconds: float | None = 20.0
    longer: Literal["split", "truncate"] = "split"
    target_fps: float | None = None
    shorter_side: int | None = None
    how: Literal["encode", "copy", "auto"] = "encode"
    crf: int = 18

    def __post_init__(self) -> None:
        problems = [
            (self.min_seconds < 0, "min_seconds must not be negative"),
            (self.max_seconds is not None and self.max_seconds <= 0, "max_seconds must be positive"),
            (self.max_seconds is not None and self.max_seconds < self.min_seconds, "max_seconds is below min_seconds"),
            (self.longer not in ("split", "truncate"), f"longer={self.longer!r}: choose split or truncate"),
            (self.how not in ("encode", "copy", "auto"), f"how={self.how!r}: choose encode, copy or auto"),
            (self.target_fps is not None and self.target_fps <= 0, "target_fps must be positive"),
            (self.shorter_side is not None and self.shorter_side < 2, "shorter_side must be 2 or more"),
            (not 0 <= self.crf <= 51, f"crf={self.crf}: 0 (best) to 51"),
            (
                self.how != "encode" and (self.target_fps is not None or self.shorter_side is not None),
                f"how={self.how!r} copies frames as they are; target_fps and shorter_side need how='encode'",
            ),
        ]
        if found := [text for holds, text in problems if holds]:
            raise UserError(f"cutting: {'; '.join(found)}.")


class Span(NamedTuple):
    """Frames [start, end) of a video, and the number of the scene that they are of, from 0."""

    scene: int
    start: int
    end: int


class Dropped(NamedTuple):
    """A part of a video that becomes no clip: seconds, and why."""

    scene: int
    start: float
    end: float
    reason: str


def choose_spans(
    scenes: Sequence[tuple[int, int]], times: np.ndarray, rules: Rules
) -> tuple[list[Span], list[Dropped]]:
    """The spans to cut out, in order of their first frames, and what is left of the scenes.

    Args:
        scenes: [start, end) frames, in any order; they may overlap. A scene's number is its index here.
        times: [N + 1] seconds at which frames are shown, and the end.
    """
    spans: list[Span] = []
    dropped: list[Dropped] = []
    for number, (start, end) in enumerate(scenes):
        if end <= start:
            reason = "it ends before it begins" if end < start else "no frame of the video lies in it"
            dropped.append(Dropped(number, float(times[start]), float(times[end]), reason))
            continue
        parts, rest = _parts(start, end, times, rules)
        for a, b in parts:
            seconds = times[b] - times[a]
            if seconds < rules.min_seconds - 1e-6:
                reason = f"scene shorter than {rules.min_seconds:g} s"
                dropped.append(Dropped(number, float(times[a]), float(times[b]), reason))
            else:
                spans.append(Span(number, a, b))
        if rest is not None:
            reason = f"scene longer than {rules.max_seconds:g} s: its end"
            dropped.append(Dropped(number, float(times[rest]), float(times[end]), reason))
    return sorted(spans, key=lambda span: (span.start, span.end, span.scene)), dropped


def _parts(start: int, end: int, times: np.ndarray, rules: Rules) -> tuple[list[tuple[int, int]], int | None]:
    """Parts of a scene, and the frame at which a rest begins that none of them has."""
    length = float(times[end] - times[start])
    if rules.max_seconds is None or length <= rules.max_seconds + 1e-6:
        return [(start, end)], None
    if rules.longer == "truncate":
        stop = int(np.searchsorted(times, times[start] + rules.max_seconds + 1e-6, side="right")) - 1
        stop = max(stop, start + 1)
        return [(start, stop)], stop
    count = math.ceil(length / rules.max_seconds - 1e-6)
    wanted = times[start] + length * np.arange(1, count) / count
    inner = [int(frame) for frame in np.searchsorted(times, wanted - 1e-6)]
    edges = sorted({start, *inner, end})
    return list(pairwise(edges)), None


def to_timestamp(scenes: Iterable[tuple[int, int]], times: np.ndarray) -> str:
    """The cell of the column `timestamp`: JSON, [[start, end], ...] in seconds from the first frame."""
    return json.dumps([[round(float(times[a]), 6), round(float(times[b]), 6)] for a, b in scenes])


def from_timestamp(cell: str, times: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) frames of a cell of `timestamp`, also of one that Open-Sora wrote: [('00:00:00.000', '00:00:01.200')].

    They are as many, and in the order, as in the cell; where no frame lies in a scene its end is not behind its start.

    Raises:
        UserError: it is neither.
    """
    frames = [int(np.abs(times - seconds).argmin()) for pair in _pairs(cell) for seconds in pair]
    return list(zip(frames[::2], frames[1::2], strict=True))


def _pairs(cell: str) -> list[tuple[float, float]]:
    codes = [3600 * int(h) + 60 * int(m) + float(s) for h, m, s in TIMECODE.findall(cell)]
    if codes and len(codes) % 2 == 0:
        return list(zip(codes[::2], codes[1::2], strict=True))
    try:
        pairs = [(float(start), float(end)) for start, end in parse_json(cell)]
        if not all(map(math.isfinite, chain.from_iterable(pairs))):
            raise ValueError("NaN and Infinity are no times")
        return pairs
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"timestamp {cell[:60]!r} is no list of [start, end] in seconds.") from error
