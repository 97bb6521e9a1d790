"""Which bucket a sample goes to in an epoch: a pure function of (row, seed, epoch), for all rows of a table at once.

A bucket is (resolution, number of frames, shape); all its samples are cut to one size, so that they make a batch. The rule,
Open-Sora's, for a sample of T frames of H x W:

 1. Resolutions are tried from the largest area to the smallest; one whose area is more than H W / 0.8 is passed over.
 2. An image (T = 1) asks for the entry of 1 frame. A video asks for the longest entry k that it is long enough for:
    T >= (k - 1) frame_interval + 1, so that a clip of exactly k frames is long enough for k (Open-Sora 1.x asks for
    one frame interval more). With `length_prob` p, an entry is passed over with probability 1 - p before it is looked at.
 3. It stays with probability `keep_prob`; else, and where there is no such entry, the next resolution is tried.
 4. Its shape is the one whose ratio is nearest to H / W. What finds no entry is left out in this epoch.

Random numbers come from a hash of (seed, epoch, row, entry): the same for any number of processes, and no draw depends on
what was drawn for another row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from opensora.datasets.buckets.aspect import Size, rounded
from opensora.datasets.buckets.config import Level, balanced_batch_sizes, parse_bucket_config
from opensora.utils.errors import UserError
from opensora.utils.seed import derive_seed

AREA_SLACK = 0.8  # an image may be enlarged to 1 / 0.8 of its area
CHUNK = 1 << 15  # rows at a time: the arrays of a chunk stay in the processor's cache
SHOWN = 8  # problems in one message
NONE = -1  # the bucket of what is left out

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
        config: See `buckets/config.py`.
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
        self.size_multiple, self.cost_power = size_multiple, cost_power
        self._plans: list[_LevelPlan] = []
        buckets: list[Bucket] = []
        draw = 0
        for level in self.levels:
            sizes = _sizes(level, size_multiple)
            unique = list(dict.fromkeys(sizes.values()))
            entries = []
            for entry in level.entries:
                entries.append(_EntryPlan(entry.num_frames, entry.keep_prob, entry.length_prob, len(buckets), draw))
                draw += 2
                for size in unique:
                    ratio = next(key for key, value in sizes.items() if value == size)
                    buckets.append(Bucket(level.resolution.name, ratio, entry.num_frames, *size, None))
            keys = np.array([float(key) for key in sizes])
            shape = np.array([unique.index(size) for size in sizes.values()], np.int32)
            self._plans.append(_LevelPlan(level.resolution.area, (keys[1:] + keys[:-1]) / 2, shape, tuple(entries)))
        self.buckets = self._with_batch_sizes(buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Any:
        return iter(self.buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self.buckets[index]

    @property
    def batch_sizes(self) -> np.ndarray:
        """[buckets] int64, per process; 0 where a bucket takes nothing."""
        return np.array([bucket.batch_size or 0 for bucket in self.buckets], np.int64)

    @property
    def is_random(self) -> bool:
        """Whether an epoch's buckets differ from another's."""
        return any(
            p not in (0, 1) for level in self.levels for e in level.entries for p in (e.keep_prob, e.length_prob)
        )

    def assign(
        self,
        num_frames: np.ndarray,
        height: np.ndarray,
        width: np.ndarray,
        *,
        seed: int,
        epoch: int,
        frame_interval: int | np.ndarray = 1,
        rows: np.ndarray | None = None,
    ) -> Assignment:
        """The bucket of every sample in an epoch.

        Args:
            num_frames, height, width: [N] of the files; 0 where unknown.
            frame_interval: One for all, or [N]: how many frames of a file one frame of the clip is, whole or not.
            rows: [N] numbers that name the samples to the random numbers; 0 ... N-1 when None.
        """
        count = len(num_frames)
        bucket, left = np.full(count, NONE, np.int32), np.empty(count, np.int8)
        salt = np.uint64(derive_seed(seed, "bucket", epoch))
        for start in range(0, count, CHUNK):
            part = slice(start, start + CHUNK)
            names = np.arange(start, min(start + CHUNK, count)) if rows is None else rows[part]
            interval = frame_interval[part] if isinstance(frame_interval, np.ndarray) else np.int64(frame_interval)
            bucket[part], left[part] = self._assign(
                num_frames[part].astype(np.int64),
                height[part].astype(np.float64),
                width[part].astype(np.float64),
                np.broadcast_to(interval, len(names)),
                hash_numbers(names.astype(np.uint64), salt),
            )
        return Assignment(bucket, left)

    def fingerprint(self) -> str:
        """A hash of all that decides buckets and batches."""
        text = repr((self.levels, self.buckets, self.size_multiple))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _assign(
        self, frames: np.ndarray, height: np.ndarray, width: np.ndarray, interval: np.ndarray, salt: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        known = (frames >= 1) & (height >= 1) & (width >= 1)  # false for NaN too
        bucket = np.full(len(frames), NONE, np.int32)
        large = np.zeros(len(frames), bool)
        area = np.where(known, height * width, 0)
        ratio = np.divide(height, width, out=np.ones(len(frames)), where=known)
        open_rows = np.flatnonzero(known)
        for plan in self._plans:
            rows = open_rows[area[open_rows] >= AREA_SLACK * plan.area]
            if not len(rows):
                continue
            large[rows] = True
            entry = plan.choose(frames[rows], interval[rows], salt[rows])
            for i, chosen in enumerate(plan.entries):
                mine = rows[entry == i]
                if chosen.keep_prob < 1:
                    mine = mine[_uniform(salt[mine], chosen.draw + 1) < chosen.keep_prob]
                bucket[mine] = chosen.first_bucket + plan.shape[np.searchsorted(plan.borders, ratio[mine])]
            open_rows = open_rows[bucket[open_rows] == NONE]
        fits = np.zeros(len(frames), bool)
        for plan in self._plans if len(open_rows) else ():  # of few rows, as a rule
            rows = open_rows[area[open_rows] >= AREA_SLACK * plan.area]
            fits[rows] |= plan.fits(frames[rows], interval[rows])
        reasons = [bucket != NONE, ~known, ~large, fits, frames == 1]
        names = [DropReason.KEPT, DropReason.UNKNOWN, DropReason.SMALL, DropReason.CHANCE, DropReason.NO_IMAGES]
        return bucket, np.select(reasons, [np.int8(name) for name in names], np.int8(DropReason.SHORT))

    def _with_batch_sizes(self, buckets: list[Bucket]) -> list[Bucket]:
        sizes = {(level.resolution.name, e.num_frames): e.batch_size for level in self.levels for e in level.entries}
        # by entry, at the nominal area: all shapes of an entry have one batch size
        areas = {level.resolution.name: level.resolution.area for level in self.levels}
        costs = [float(frames * areas[name]) ** self.cost_power for name, frames in sizes]
        resolved = dict(zip(sizes, balanced_batch_sizes(costs, list(sizes.values())), strict=True))
        return [bucket._replace(batch_size=resolved[bucket.resolution, bucket.num_frames]) for bucket in buckets]


class SizeRules(Protocol):
    """What is asked of a VAE."""

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]: ...

    def legal_num_frames(self, num_frames: int) -> int: ...


def refuse_illegal_sizes(buckets: Buckets, vae: SizeRules, patch_size: Sequence[int]) -> None:
    """See that VAE and denoiser take every size without cutting or filling it up.

    Raises:
        UserError: lists the sizes they do not take, each with the nearest that they do.
    """
    probe = 64 * max(patch_size)  # any size that every VAE takes; its latent tells the VAE's factors
    _, h, w = vae.latent_size((vae.legal_num_frames(1), probe, probe))
    units = probe // h * patch_size[1], probe // w * patch_size[2]
    problems = []
    for bucket in buckets:
        near = tuple(max(1, round(side / unit)) * unit for side, unit in zip(bucket[3:5], units, strict=True))
        frames = vae.legal_num_frames(bucket.num_frames)
        if near != (bucket.height, bucket.width):
            problems.append(
                f"  {bucket.resolution}: {bucket.height}x{bucket.width} is no multiple of {units[0]}x{units[1]}, the "
                f"nearest is {near[0]}x{near[1]}"
            )
        if frames != bucket.num_frames:
            problems.append(f"  {bucket.resolution}: {bucket.num_frames} frames; the VAE takes {frames}")
    problems = list(dict.fromkeys(problems))
    if problems:
        more = [f"  and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise UserError(
            "\n".join(
                [
                    "bucket_config has sizes that VAE x patch do not take (frames, height x width):",
                    *problems[:SHOWN],
                    *more,
                ]
            )
            + f"\nHeights and widths of named resolutions follow dataset.size_multiple={buckets.size_multiple}; "
            f"{max(units)} fits."
        )


class _EntryPlan(NamedTuple):
    num_frames: int
    keep_prob: float
    length_prob: float
    first_bucket: int  # of its shapes
    draw: int  # its first random number


class _LevelPlan(NamedTuple):
    area: int
    borders: np.ndarray  # [R - 1] between neighbouring ratios
    shape: np.ndarray  # [R] ratio -> shape
    entries: tuple[_EntryPlan, ...]  # the longest first

    def choose(self, frames: np.ndarray, interval: np.ndarray, salt: np.ndarray) -> np.ndarray:
        """[n] index of the entry that a sample asks for, or -1."""
        chosen = np.full(len(frames), -1, np.int8)
        for i, entry in enumerate(self.entries):
            able = (chosen < 0) & _able(entry.num_frames, frames, interval)
            if entry.length_prob < 1:
                rows = np.flatnonzero(able)
                able[rows] = _uniform(salt[rows], entry.draw) < entry.length_prob
            chosen[able] = i
        return chosen

    def fits(self, frames: np.ndarray, interval: np.ndarray) -> np.ndarray:
        """[n] whether a sample is long enough for any entry."""
        able = [_able(entry.num_frames, frames, interval) for entry in self.entries]
        return np.logical_or.reduce(able)


def _able(num_frames: int, frames: np.ndarray, interval: np.ndarray) -> np.ndarray:
    return frames == 1 if num_frames == 1 else (frames > 1) & (frames >= (num_frames - 1) * interval + 1)


def _sizes(level: Level, multiple: int) -> dict[str, Size]:
    sizes = level.resolution.sizes
    if "x" in level.resolution.name.removesuffix("px"):
        return sizes
    return {key: rounded(size, multiple) for key, size in sizes.items()}


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
