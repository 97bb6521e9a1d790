"""`duplicate_of`: the clip, earlier in the table, that this one repeats; `duplicate_bits`: how far apart the two are.

Clips are compared by perceptual hashes of three frames: which of the 8 x 8 lowest frequencies of a 32 x 32 grey image's
cosine transform, without the constant row and column, are above their median (pHash; Zauner 2010, "Implementation and
Benchmarking of Perceptual Image Hash Functions"). `phash` holds them, 48 hexadecimal digits. Another codec, size or frame rate changes a few bits, another
image about half of them. Not found: mirrored or cropped clips, other lengths of the same take, and clips that are one plain
colour, which all look alike and have no hash.

Alike are clips of which no frame differs in more than `bits`. Of n clips not all n^2 / 2 pairs are compared: two hashes that
differ in at most b bits have one of b + 1 chunks in common, so only clips that share such a chunk in each frame are. What is
in memory grows with n, also where all clips are alike.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from opensora.utils.errors import UserError
from tools.scoring.frames import KEY_POINTS, Row, each_file, key_frames, luma, opencv
from tools.scoring.registry import SCORERS

SIDE, LOW = 32, 8
FRAMES = len(KEY_POINTS)
PLAIN = 2.0  # grey levels of standard deviation, below which an image is one colour
FEW = 2000  # clips: up to here each that is kept is compared with all behind it
BLOCK = 1 << 16  # pairs compared at a time
ONES = np.array([bin(i).count("1") for i in range(1 << 16)], np.uint8)  # bits that are set
MIX = np.uint64(0x9E3779B97F4A7C15)  # any large odd number
MOST_BITS = 15  # the chunks become too short to tell clips apart


@dataclass(frozen=True)
class Duplicate:
    """`bits`: of 64 that may differ in each of the frames."""

    bits: int = 6
    columns = ("phash",)
    compared = ("duplicate_of", "duplicate_bits")
    needs = ()

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """The hash; None for a clip of one colour."""
        return each_file(paths, self.columns, lambda path: {"phash": clip_hash(path)})

    def compare(self, table: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
        """The path of the first clip that a row repeats and the bits, None where it repeats none."""
        if not 0 <= self.bits <= MOST_BITS:
            raise UserError(f"duplicate: bits={self.bits}; choose 0 to {MOST_BITS} of the 64 bits of a frame.")
        rows, hashes, count = parsed(table["phash"])
        of, distance = np.full(count, -1), np.zeros(count, np.int8)
        for later, earlier, bits in first_alike(hashes, self.bits):
            of[rows[later]], distance[rows[later]] = rows[earlier], bits
        first = set(of[of >= 0].tolist())
        paths = {row: path for row, path in enumerate(table["path"]) if row in first}
        return {
            "duplicate_of": [paths.get(row) for row in of.tolist()],
            "duplicate_bits": [
                bits if row >= 0 else None for row, bits in zip(of.tolist(), distance.tolist(), strict=True)
            ],
        }


def clip_hash(path: Path) -> str | None:
    """The hashes of a clip's frames as hexadecimal digits."""
    frames = key_frames(path)
    if all(luma(frame).std() < PLAIN for frame in frames):
        return None
    return "".join(f"{frame_hash(frame):016x}" for frame in frames)


def frame_hash(frame: np.ndarray) -> int:
    """64 bits of a frame [H, W, 3] uint8."""
    cv2 = opencv()
    small = cv2.resize(luma(frame), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    low = cv2.dct(small)[1 : LOW + 1, 1 : LOW + 1].ravel()
    return int("".join("1" if value else "0" for value in low > np.median(low)), 2)


def parsed(texts: Iterable[Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """(rows, hashes, count) of cells of `phash`: the numbers [N] of the rows that have one, [N, F] uint64, and how many rows
    there are. Never are all texts in memory: one takes as much as four hashes."""
    rows, raw, count = array("q"), bytearray(), 0
    for count, text in enumerate(texts, start=1):
        if text:
            rows.append(count - 1)
            raw += bytes.fromhex(str(text))
    hashes = np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, FRAMES)
    return np.frombuffer(rows, np.int64), hashes, count


def first_alike(hashes: np.ndarray, bits: int) -> Iterator[tuple[int, int, int]]:
    """(later, earlier, bits) for each clip of [N, F] uint64 that is like an earlier one which is itself like none before it.

    So `earlier` is never a duplicate, and what is compared is the pair itself: no chains of ever less alike clips.
    """
    _, first, group = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    kinds = np.sort(first)  # the first clip of each hash, in the order of the table
    repeated = np.arange(len(hashes))
    repeated[kinds] = kinds[earliest_kept(hashes[kinds], bits)]
    of = repeated[first[group.reshape(-1)]]
    rows = np.flatnonzero(of != np.arange(len(of)))
    for start in range(0, len(rows), BLOCK):
        later = rows[start : start + BLOCK]
        apart = _apart(hashes[later], hashes[of[later]])
        yield from zip(later.tolist(), of[later].tolist(), apart.tolist(), strict=True)


def earliest_kept(hashes: np.ndarray, bits: int) -> np.ndarray:
    """[N] the earliest clip that is kept and that each clip is like; of clips that are kept, themselves.

    A clip is kept when it is like none that is kept before it. Pairs are never held, of which alike clips have N^2 / 2: each
    clip looks for the earliest that it is like, which decides nearly all. Left open are those of which that one is itself a
    repetition: they look among the clips that are kept, and what is like none of these is decided some thousand at a time.
    """
    of = np.arange(len(hashes))
    undecided = of
    if len(hashes) > FEW:
        nearest = of.copy()
        _look(hashes, bits, of, of, nearest)
        undecided = _decide(nearest, of)
        kept = np.setdiff1d(np.flatnonzero(of == np.arange(len(of))), undecided, assume_unique=True)
        _look(hashes, bits, undecided, kept, of)
    free = undecided[of[undecided] == undecided]
    while len(free):
        some, free = free[:FEW], free[FEW:]
        of[some] = some[_kept_of_few(hashes[some], bits)]
        if len(free):
            _look(hashes, bits, undecided, some[of[some] == some], of)
            free = free[of[free] == free]
    return of


def _decide(nearest: np.ndarray, of: np.ndarray) -> np.ndarray:
    """From the earliest clip that each clip is like, itself where there is none, set what it repeats; returns the clips, in the
    order of the table, for which that does not tell, since the other is itself a repetition or undecided."""
    undecided: list[int] = []
    kept = nearest == np.arange(len(nearest))
    for row in np.flatnonzero(~kept).tolist():
        if kept[nearest[row]]:
            of[row] = nearest[row]
        else:
            undecided.append(row)
    return np.array(undecided, np.int64)


def _kept_of_few(hashes: np.ndarray, bits: int) -> np.ndarray:
    """[N] as `earliest_kept`, by comparing each clip that is kept with all behind it that are like none yet."""
    of = np.arange(len(hashes))
    for row in range(len(of)):
        if of[row] == row:
            behind = row + 1 + np.flatnonzero(of[row + 1 :] == np.arange(row + 1, len(of)))
            of[behind[_apart(hashes[behind], hashes[[row]]) <= bits]] = row
    return of


def _look(hashes: np.ndarray, bits: int, rows: np.ndarray, among: np.ndarray, of: np.ndarray) -> None:
    """Set `of` of each of the rows to the earliest clip `among` some that it is like, where that is earlier than what `of` has."""
    if not len(rows):
        return
    for wanted, key in zip(_keys(hashes[rows], bits), _keys(hashes[among], bits), strict=True):
        candidates = np.arange(len(key))
        if len(rows) < len(among):  # so that only those are sorted that any row asks for
            asked = np.sort(wanted)
            candidates = np.flatnonzero(asked[np.minimum(np.searchsorted(asked, key), len(asked) - 1)] == key)
        candidates = candidates[np.argsort(key[candidates], kind="stable")]  # of one key in the order of the table
        key, clips = key[candidates], among[candidates]
        # in the order of keys they are found in half the time
        asking = candidates if rows is among else np.arange(len(rows))
        for start in range(0, len(rows), BLOCK):
            some = asking[start : start + BLOCK]
            index = np.searchsorted(key, wanted[some])
            _compare(hashes, bits, (rows[some], wanted[some], index), (clips, key), of)


def _compare(
    hashes: np.ndarray, bits: int, looking: tuple[np.ndarray, ...], among: tuple[np.ndarray, np.ndarray], of: np.ndarray
) -> None:
    """Compare rows with the clips that have the same key, in the order of the table, until each has met one that it is like, or
    one that is no earlier than what it has.

    Args:
        looking: [M] the rows, their keys, and where in `among` their keys begin.
        among: [K] clips and their keys, in the order of the keys.
    """
    clips, keys = among
    while True:
        rows, wanted, index = (values[looking[2] < len(keys)] for values in looking)
        hopeful = (keys[index] == wanted) & (clips[index] < of[rows])
        rows, wanted, index = rows[hopeful], wanted[hopeful], index[hopeful]
        if not len(rows):
            return
        alike = _apart(hashes[rows], hashes[clips[index]]) <= bits
        of[rows[alike]] = clips[index[alike]]
        looking = rows[~alike], wanted[~alike], index[~alike] + 1


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N] bits by which the most different frame differs, of [N, F] hashes."""
    return ONES[(a ^ b).view(np.uint16)].reshape(*a.shape, 4).sum(axis=-1).max(axis=1)


def _keys(hashes: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    """[N] uint64 for each choice of a chunk in every frame: equal where clips agree in all of them. By chance also elsewhere,
    which costs a comparison."""
    edges = np.linspace(0, 64, bits + 2).astype(int)
    chunks = [(np.uint64(low), np.uint64((1 << int(high - low)) - 1)) for low, high in pairwise(edges)]
    for choice in product(chunks, repeat=hashes.shape[1]):
        key = np.zeros(len(hashes), np.uint64)
        for frame, (low, mask) in enumerate(choice):
            key = key * MIX + ((hashes[:, frame] >> low) & mask)
        yield key


SCORERS["duplicate"] = Duplicate()
