"""What a `bucket_config` says, checked: which sizes and lengths there are, how likely each is, and its batch size.

    bucket_config = {
        "480p": {1: (1.0, 52), 16: (0.5, 4), 32: (0.0, None)},       # resolution -> frames -> (keep_prob, batch_size)
        "240p": {"2s": (1.0, 20), "4s": ((1.0, 0.33), 10)},          # ((keep_prob, length_prob), batch_size)
    }

`keep_prob`: how often a sample that is large and long enough for an entry stays in it; else it moves on to the next smaller
resolution. `length_prob`: how often a length is considered at all; else a shorter one of the same resolution is tried.
`(0.0, None)`: nothing stays; so clips of that length are kept out of the shorter entries of that resolution.
`batch_size` is per process. "auto" takes it from the other entries: B (frames height width)^cost_power is the same for all.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from opensora.datasets.buckets.aspect import Resolution, get_resolution
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

BatchSize = int | Literal["auto"] | None
# Open-Sora 1.2's names: multiples of its VAE's 17 frames, in seconds at about 24 frames a second
FRAME_ALIASES = {
    "1x": 51, "2x": 102, "4x": 204, "8x": 408, "16x": 816,
    "2s": 51, "4s": 102, "8s": 204, "16s": 408, "32s": 816,
}  # fmt: skip
EXPECTED = "(keep_prob, batch_size) or ((keep_prob, length_prob), batch_size)"


class Entry(NamedTuple):
    """One length of one resolution."""

    num_frames: int
    keep_prob: float
    length_prob: float
    batch_size: BatchSize


class Level(NamedTuple):
    """One resolution with its lengths, the longest first."""

    resolution: Resolution
    entries: tuple[Entry, ...]


def parse_bucket_config(config: Mapping[str, Mapping[Any, Any]]) -> list[Level]:
    """The levels of a config, the largest area first.

    Raises:
        UserError: lists everything that is wrong with it.
    """
    problems: list[str] = []
    levels = [level for name, entries in config.items() if (level := _level(str(name), entries, problems))]
    if not config:
        problems.append("it is empty")
    if levels and not any(entry.keep_prob > 0 for level in levels for entry in level.entries):
        problems.append("every keep_prob is 0, so nothing would be trained on")
    entries = [entry for level in levels for entry in level.entries]
    if any(entry.batch_size == "auto" for entry in entries) and not any(isinstance(e.batch_size, int) for e in entries):
        problems.append("every batch size is 'auto'; give at least one as a number to measure the others by")
    if problems:
        raise UserError("\n".join(["bucket_config:", *(f"  {problem}." for problem in problems)]))
    return sorted(levels, key=lambda level: -level.resolution.area)


def parse_num_frames(text: int | str) -> int:
    """Frames of 16, "16" or of an alias such as "2s" or "4x".

    Raises:
        UserError: it is none of these.
    """
    number = FRAME_ALIASES.get(str(text), text)
    if isinstance(number, str) and number.isdecimal():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UserError(
            f"{text!r} is no number of frames: write an integer from 1, or one of {', '.join(FRAME_ALIASES)}"
        )
    return number


def balanced_batch_sizes(costs: list[float], batch_sizes: list[BatchSize]) -> list[int | None]:
    """Batch sizes with "auto" resolved: the largest whole number whose batch costs no more than the cheapest that is given.

    Args:
        costs: Of one sample of each bucket.
        batch_sizes: As configured.
    """
    given = [cost * size for cost, size in zip(costs, batch_sizes, strict=True) if isinstance(size, int)]
    return [
        size if isinstance(size, int) or size is None else max(1, int(min(given) / cost + 1e-9))
        for cost, size in zip(costs, batch_sizes, strict=True)
    ]


def _level(name: str, entries: Any, problems: list[str]) -> Level | None:
    try:
        resolution = get_resolution(name)
    except UserError as error:
        problems.append(str(error).rstrip("."))
        return None
    if not isinstance(entries, Mapping) or not entries:
        problems.append(f"{name}: {entries!r} is no dict of frames -> {EXPECTED}")
        return None
    parsed = [entry for key, value in entries.items() if (entry := _entry(name, key, value, problems))]
    lengths = [entry.num_frames for entry in parsed]
    if twice := sorted({n for n in lengths if lengths.count(n) > 1}):
        problems.append(f"{name}: {twice[0]} frames are there twice; an alias counts as its number")
    return Level(resolution, tuple(sorted(parsed, reverse=True)))


def _entry(name: str, key: Any, value: Any, problems: list[str]) -> Entry | None:
    size: Any
    where = f"{name}, {key!r}"
    try:
        num_frames = parse_num_frames(key)
    except UserError as error:
        problems.append(f"{name}: {error}{did_you_mean(str(key), list(FRAME_ALIASES)).rstrip('?')}")
        return None
    match value:
        case [[keep, length], size]:
            pass
        case [[*_], _]:
            keep = length = size = "wrong"
        case [keep, size]:
            length = 1.0
        case _:
            keep = length = size = "wrong"
    if not (_is_probability(keep) and _is_probability(length)):
        problems.append(f"{where}: {value!r} is not {EXPECTED} with probabilities from 0 to 1")
        return None
    if keep == 0 and size is None:
        return Entry(num_frames, 0.0, float(length), None)
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        problems.append(
            f"{where}: batch size {size!r} must be a number from 1 or 'auto'; None goes with keep_prob 0 only"
        )
        return None
    if num_frames == 1 and length != 1:
        problems.append(f"{where}: length_prob has no effect on images; write ({keep}, {size})")
        return None
    return Entry(num_frames, float(keep), float(length), size)


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
