"""Which bucket a sample goes to in an epoch: a pure function of (row, seed, epoch), for all rows of a table at once.

A bucket is (resolution, number of frames, shape); all its samples are cropped to one size, so that they make a batch. The rule,
Open-Sora's, for a sample of T frames of H x W:

 1. Resolutions are tried from the largest area to the smallest; one whose area is more than H W / 0.8 is passed over.
 2. An image (T = 1) asks for the entry of 1 frame. A video asks for the longest entry k that it is long enough for:
    T >= (k - 1) frame_interval + 1, so that a clip of exactly k frames is long enough for k (Open-Sora 1.x asks for
    one frame interval more). With `length_prob` p, an entry is passed over with probability 1 - p before it is looked at.
 3. It stays with probability `keep_prob`; else, and where there is no such entry, the next resolution is tried.
 4. Its shape is the one whose ratio is nearest to H / W. What finds no entry is left out in this epoch.

A `bucket_config` is resolution -> frames -> (keep_prob, batch_size) or ((keep_prob, length_prob), batch_size); docs/how-to/buckets.md
explains it. Random numbers come from a hash of (seed, epoch, row, entry): the same for any number of processes, and no draw
depends on what was drawn for another row.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np

from opensora.datasets.buckets.aspect import Resolution, Size, get_resolution, rounded
from opensora.utils.errors import UserError
from opensora.utils.seed import derive_seed

logger = logging.getLogger(__name__)

AREA_SLACK = 0.8  # an image may be enlarged to 1 / 0.8 of its area
CHUNK = 1 << 15  # rows at a time: the arrays of a chunk stay in the processor's cache
SHOWN = 8  # problems in one message
NONE = -1  # the bucket of what is left out

# Open-Sora 1.2's names: multiples of its VAE's 17 frames, in seconds at about 24 frames a second
FRAME_ALIASES = {
    "1x": 51, "2x": 102, "4x": 204, "8x": 408, "16x": 816,
    "2s": 51, "4s": 102, "8s": 204, "16s": 408, "32s": 816,
}  # fmt: skip
EXPECTED = "(keep_prob, batch_size) or ((keep_prob, length_prob), batch_size)"

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_MASK = (1 << 64) - 1


class DropReason(IntEnum):
    """Why a sample is in no bucket."""

    KEPT = 0
    UNKNOWN = 1  # its size is not known
    SMALL = 2  # smaller than every resolution
    SHORT = 3  # large enough for some, long enough for no entry of these
    NO_IMAGES = 4  # an image, and no resolution that it is large enough for has an entry of 1 frame
    CHANCE = 5  # the probabilities of all its entries together are below 1
    SLOW = 6  # a video of fewer frames a second than are asked for, set by the dataset


class Entry(NamedTuple):
    """One length of one resolution."""

    num_frames: int
    keep_prob: float
    length_prob: float
    batch_size: int | Literal["auto"] | None


class Level(NamedTuple):
    """One resolution with its lengths, the longest first."""

    resolution: Resolution
    entries: tuple[Entry, ...]


class Bucket(NamedTuple):
    """What all samples of a bucket share. `batch_size` is per process; None: the bucket takes nothing."""

    resolution: str
    ratio: str
    num_frames: int
    height: int
    width: int
    batch_size: int | None

    @property
    def name(self) -> str:
        """For tables and messages."""
        return f"{self.resolution} {self.num_frames}x{self.height}x{self.width}"

    @property
    def num_bytes(self) -> int:
        """Of a batch of fp32 videos."""
        return (self.batch_size or 0) * self.num_frames * self.height * self.width * 3 * 4


class Assignment(NamedTuple):
    """The bucket of each row."""

    bucket: np.ndarray  # [N] int32, its index or NONE
    drop_reason: np.ndarray  # [N] int8, values of `DropReason`


class Buckets:
    """The buckets of a `bucket_config`.

    Args:
        config: See the module's docstring.
        size_multiple: Sizes of the aspect tables are moved to the nearest multiple: VAE x patch, usually 16. Sizes that a
            config writes out ("240x424") stay. Shapes of one resolution that become one size are one bucket.
        cost_power: Batch sizes "auto" make batch_size (frames height width)^cost_power equal.

    Raises:
        UserError: lists everything that is wrong with the config.
    """

    def __init__(
        self, config: Mapping[str, Mapping[Any, Any]], size_multiple: int = 16, cost_power: float = 1.0
    ) -> None:
        self.levels = parse_bucket_config(config)
        self.size_multiple = size_multiple
        self.buckets: list[Bucket] = []
        # of each level: [R - 1] the borders between neighbouring ratios, [R] ratio -> shape, the first bucket of each entry
        self._plans: list[tuple[np.ndarray, np.ndarray, list[int]]] = []
        # "auto" is the largest batch that costs no more than the cheapest that is given, at the nominal area
        every = [(entry, level.resolution.area) for level in self.levels for entry in level.entries]
        budget = min(
            (
                e.batch_size * float(e.num_frames * area) ** cost_power
                for e, area in every
                if isinstance(e.batch_size, int)
            ),
            default=0,
        )
        for level in self.levels:
            name, sizes = level.resolution.name, level.resolution.sizes
            if "x" not in name.removesuffix("px"):  # a size that a config writes out stays
                sizes = {key: rounded(size, size_multiple) for key, size in sizes.items()}
            ratio_of_size: dict[Size, str] = {}
            for key, size in sizes.items():
                ratio_of_size.setdefault(size, key)
            first_buckets = []
            for entry in level.entries:
                batch_size = entry.batch_size
                if batch_size == "auto":
                    cost = float(entry.num_frames * level.resolution.area) ** cost_power
                    batch_size = max(1, int(budget / cost + 1e-9))
                first_buckets.append(len(self.buckets))
                for size, ratio in ratio_of_size.items():
                    self.buckets.append(Bucket(name, ratio, entry.num_frames, *size, batch_size))
            ratios = np.array([float(key) for key in sizes])
            shape = np.array([list(ratio_of_size).index(size) for size in sizes.values()], np.int32)
            self._plans.append(((ratios[1:] + ratios[:-1]) / 2, shape, first_buckets))

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self.buckets[index]

    @property
    def batch_sizes(self) -> np.ndarray:
        """[buckets] int64, per process; 0 where a bucket takes nothing."""
        return np.array([bucket.batch_size or 0 for bucket in self.buckets], np.int64)

    def assign(
        self,
        num_frames: np.ndarray,
        height: np.ndarray,
        width: np.ndarray,
        *,
        seed: int,
        epoch: int,
        frame_interval: int | np.ndarray = 1,
    ) -> Assignment:
        """The bucket of every sample in an epoch, by the [N] sizes of the files, 0 where unknown.

        `frame_interval`, one for all or [N], is how many frames of a file one frame of the clip is, whole or not.
        """
        count = len(num_frames)
        bucket, reason = np.full(count, NONE, np.int32), np.empty(count, np.int8)
        intervals = np.broadcast_to(frame_interval, count)
        seed = derive_seed(seed, "bucket", epoch)
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            salt = hash_numbers(np.arange(part.start, part.stop, dtype=np.uint64), np.uint64(seed))
            sizes = (height[part].astype(np.float64), width[part].astype(np.float64))
            bucket[part], reason[part] = self._assign(num_frames[part].astype(np.int64), *sizes, intervals[part], salt)
        return Assignment(bucket, reason)

    def _assign(
        self, frames: np.ndarray, height: np.ndarray, width: np.ndarray, interval: np.ndarray, salt: np.ndarray
    ) -> Assignment:
        """`assign` for some rows, [n] each; `salt`: where the random numbers of each row begin."""
        known = (frames >= 1) & (height >= 1) & (width >= 1)  # false for NaN too
        area = np.where(known, height * width, 0)
        ratio = np.divide(height, width, out=np.ones(len(frames)), where=known)
        bucket = np.full(len(frames), NONE, np.int32)
        is_large, is_long = np.zeros((2, len(frames)), bool)  # enough for any level, and for any entry of these
        unassigned = np.flatnonzero(known)
        draw = 0  # each entry has two random numbers
        for level, (borders, shape, first_buckets) in zip(self.levels, self._plans, strict=True):
            rows = unassigned[area[unassigned] >= AREA_SLACK * level.resolution.area]
            is_large[rows] = True
            length, step = frames[rows], interval[rows]
            for entry, first_bucket in zip(level.entries, first_buckets, strict=True):
                able = length == 1
                if entry.num_frames > 1:
                    able = (length > 1) & (length >= (entry.num_frames - 1) * step + 1)
                is_long[rows[able]] = True
                if entry.length_prob < 1:
                    able[able] = _uniform(salt[rows[able]], draw) < entry.length_prob
                chosen, others = rows[able], ~able
                rows, length, step = rows[others], length[others], step[others]
                if entry.keep_prob < 1:
                    chosen = chosen[_uniform(salt[chosen], draw + 1) < entry.keep_prob]
                bucket[chosen] = first_bucket + shape[np.searchsorted(borders, ratio[chosen])]
                draw += 2
            unassigned = unassigned[bucket[unassigned] == NONE]
        conditions = [bucket != NONE, ~known, ~is_large, is_long, frames == 1]
        reasons = [DropReason.KEPT, DropReason.UNKNOWN, DropReason.SMALL, DropReason.CHANCE, DropReason.NO_IMAGES]
        values = [np.int8(reason) for reason in reasons]
        return Assignment(bucket, np.select(conditions, values, np.int8(DropReason.SHORT)))

    def reachable(
        self, num_frames: np.ndarray, height: np.ndarray, width: np.ndarray, *, frame_interval: int | np.ndarray = 1
    ) -> np.ndarray:
        """[N, entries] int32, the buckets that `assign` may give a sample in some epoch, the largest first; NONE elsewhere.

        Arguments are those of `assign`.
        """
        frames, interval = num_frames.astype(np.int64), np.broadcast_to(frame_interval, len(num_frames))
        arrives = (frames >= 1) & (height >= 1) & (width >= 1)  # at the level that comes next
        area = np.where(arrives, height.astype(np.float64) * width, 0)
        ratio = np.divide(height.astype(np.float64), width, out=np.ones(len(frames)), where=arrives)
        columns = []
        for level, (borders, shape, first_buckets) in zip(self.levels, self._plans, strict=True):
            waits = arrives & (area >= AREA_SLACK * level.resolution.area)  # for an entry of this level
            arrives = arrives & ~waits
            for entry, first_bucket in zip(level.entries, first_buckets, strict=True):
                able = waits & (frames == 1)
                if entry.num_frames > 1:
                    able = waits & (frames > 1) & (frames >= (entry.num_frames - 1) * interval + 1)
                considered = able & (entry.length_prob > 0)
                bucket = first_bucket + shape[np.searchsorted(borders, ratio)]
                columns.append(np.where(considered & (entry.keep_prob > 0), bucket, NONE))
                arrives |= considered & (entry.keep_prob < 1)
                waits &= ~(able & (entry.length_prob == 1))
            arrives |= waits
        return np.stack(columns, axis=1).astype(np.int32)

    def fingerprint(self) -> str:
        """A hash of all that decides buckets and batches."""
        text = repr((self.levels, self.buckets, self.size_multiple))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parse_bucket_config(config: Mapping[str, Mapping[Any, Any]]) -> list[Level]:
    """The levels of a config, the largest area first; a `UserError` lists everything that is wrong with it."""
    problems: list[str] = []
    levels = []
    for name, values in config.items():
        try:
            resolution = get_resolution(str(name))
        except UserError as error:
            problems.append(str(error).rstrip("."))
            continue
        if not isinstance(values, Mapping) or not values:
            problems.append(f"{name}: {values!r} is no dict of frames -> {EXPECTED}")
            continue
        entries = []
        for key, value in values.items():
            try:
                entries.append(_entry(key, value))
            except UserError as error:
                problems.append(f"{name}, {error}")
        lengths = [entry.num_frames for entry in entries]
        if twice := sorted({n for n in lengths if lengths.count(n) > 1}):
            problems.append(f"{name}: {twice[0]} frames are there twice; an alias counts as its number")
        levels.append(Level(resolution, tuple(sorted(entries, reverse=True))))
    every = [entry for level in levels for entry in level.entries]
    if not config:
        problems.append("it is empty")
    if levels and not any(entry.keep_prob > 0 for entry in every):
        problems.append("every keep_prob is 0, so nothing would be trained on")
    if any(entry.batch_size == "auto" for entry in every) and not any(isinstance(e.batch_size, int) for e in every):
        problems.append("every batch size is 'auto'; give at least one as a number to measure the others by")
    if problems:
        raise UserError("\n".join(["bucket_config:", *(f"  {problem}." for problem in problems)]))
    return sorted(levels, key=lambda level: -level.resolution.area)


def parse_num_frames(text: int | str) -> int:
    """Frames of 16, "16" or of an alias such as "2s" or "4x"; a `UserError` for others."""
    number = FRAME_ALIASES.get(str(text), text)
    if isinstance(number, str) and number.isdecimal():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UserError(
            f"{text!r} is no number of frames: write an integer from 1, or one of {', '.join(FRAME_ALIASES)}"
        )
    return number


def _entry(key: Any, value: Any) -> Entry:
    """An entry of a config; a `UserError` says what is wrong with it."""
    num_frames = parse_num_frames(key)
    keep: Any
    keep, size = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    keep, length = keep if isinstance(keep, list | tuple) and len(keep) == 2 else (keep, 1.0)
    if not all(isinstance(p, int | float) and not isinstance(p, bool) and 0 <= p <= 1 for p in (keep, length)):
        raise UserError(f"{key!r}: {value!r} is not {EXPECTED} with probabilities from 0 to 1")
    if keep == 0 and size is None:
        return Entry(num_frames, 0.0, float(length), None)
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UserError(
            f"{key!r}: batch size {size!r} must be a number from 1 or 'auto'; None goes with keep_prob 0 only"
        )
    if num_frames == 1 and length != 1:
        raise UserError(f"{key!r}: length_prob has no effect on images; write ({keep}, {size})")
    return Entry(num_frames, float(keep), float(length), size)


def move_to_legal_sizes(buckets: Buckets, vae: Any) -> None:
    """Move heights and widths to the nearest that the VAE takes; moves are logged in one line.

    Raises:
        UserError: the VAE does not take the length of a bucket; the message lists all, with the nearest that it takes.
    """
    moved: dict[str, None] = {}
    problems: dict[str, None] = {}
    for i, (resolution, _, num_frames, height, width, _) in enumerate(buckets):
        legal, *near = vae.legal_size((num_frames, height, width))
        if near != [height, width]:
            moved[f"{height}x{width} to {near[0]}x{near[1]}"] = None
            buckets.buckets[i] = buckets[i]._replace(height=near[0], width=near[1])
        if legal != num_frames:
            problems[f"  {resolution}: {num_frames} frames; the VAE takes {legal}"] = None
    if problems:
        more = [f"  and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise UserError(
            "\n".join(["bucket_config has lengths that the VAE does not take:", *[*problems][:SHOWN], *more])
        )
    if moved:
        more = [f"and {len(moved) - SHOWN} more"] if len(moved) > SHOWN else []
        logger.info("bucket_config: moved to sizes that the VAE takes: %s.", ", ".join([*[*moved][:SHOWN], *more]))


def hash_numbers(numbers: np.ndarray, salt: np.ndarray | np.uint64) -> np.ndarray:
    """A 64-bit hash of each number (SplitMix64, Steele et al. 2014): uint64 in, uint64 out."""
    x = (numbers + np.uint64(1)) * np.uint64(_GOLDEN) + salt
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    return x


def _uniform(salt: np.ndarray, draw: int) -> np.ndarray:
    """The `draw`-th random number of each sample, in [0, 1)."""
    return (hash_numbers(salt, np.uint64(draw * _MIX1 & _MASK)) >> np.uint64(11)) * 2.0**-53
