"""`duplicate_of`: the clip, earlier in the table, that this one repeats; `duplicate_bits`: how far apart the two are.

Clips are compared by perceptual hashes of three frames: which of the 8 x 8 lowest frequencies of a 32 x 32 grey picture's
cosine transform, without the constant row and column, are above their median (pHash; Zauner 2010, "Implementation and
Benchmarking of Perceptual Image Hash Functions"). `phash` holds them, 48 hexadecimal digits. Another codec, size or frame rate changes a few bits, another
picture about half of them. Not found: mirrored or cropped clips, other lengths of the same take, and clips that are one plain
colour, which all look alike and have no hash.

Alike are clips of which no frame differs in more than `bits`. Of n clips not all n^2 / 2 pairs are compared: two hashes that
differ in at most b bits have one of b + 1 pieces in common, so only clips that share such a piece in each frame are.
"""

from collections.abc import Iterator, Mapping, Sequence
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
PLAIN = 2.0  # grey levels of standard deviation, below which a picture is one colour
FEW = 2000  # clips: up to here all pairs are compared
BLOCK = 1 << 20  # pairs compared at a time
ONES = np.array([bin(i).count("1") for i in range(1 << 16)], np.uint8)  # bits that are set
MIX = np.uint64(0x9E3779B97F4A7C15)  # any large odd number
MOST_BITS = 15  # the pieces become too short to tell clips apart


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

    def compare(self, table: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The path of the first clip that a row repeats and the bits, None where it repeats none."""
        if not 0 <= self.bits <= MOST_BITS:
            raise UserError(f"duplicate: bits={self.bits}; choose 0 to {MOST_BITS} of the 64 bits of a frame.")
        rows = np.array([row for row, value in enumerate(table["phash"]) if value], dtype=np.int64)
        hashes = np.array([parse(str(table["phash"][row])) for row in rows], np.uint64).reshape(-1, FRAMES)
        of: list[Any] = [None] * len(table["phash"])
        distance: list[Any] = [None] * len(of)
        for later, earlier, bits in first_alike(hashes, self.bits):
            of[rows[later]], distance[rows[later]] = table["path"][rows[earlier]], bits
        return {"duplicate_of": of, "duplicate_bits": distance}


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


def parse(text: str) -> list[int]:
    """The hashes of the frames."""
    return [int(text[i : i + 16], 16) for i in range(0, 16 * FRAMES, 16)]


def first_alike(hashes: np.ndarray, bits: int) -> Iterator[tuple[int, int, int]]:
    """(later, earlier, bits) for each clip of [N, F] uint64 that is like an earlier one which is itself like none before it.

    So `earlier` is never a duplicate, and what is compared is the pair itself: no chains of ever less alike clips.
    """
    _, first, group = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    kinds = np.sort(first)  # the first clip of each hash, in the order of the table
    later, earlier = alike(hashes[kinds], bits)
    order = np.lexsort((earlier, later))
    repeats: dict[int, int] = {}
    for i, j in zip(kinds[later[order]].tolist(), kinds[earlier[order]].tolist(), strict=True):
        if i not in repeats and j not in repeats:
            repeats[i] = j
    for row, same in enumerate(first[group.reshape(-1)].tolist()):
        of = repeats.get(same, same)
        if of != row:
            yield row, of, int(_apart(hashes[[row]], hashes[[of]])[0])


def alike(hashes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (later, earlier) of which no frame differs in more than `bits`."""
    count = len(hashes)
    blocks = _all_pairs(count) if count <= FEW else _pairs_with_a_common_piece(hashes, bits)
    found: list[np.ndarray] = [np.empty((0, 2), np.int64)]
    for later, earlier in blocks:
        near = _apart(hashes[later], hashes[earlier]) <= bits
        found.append(np.stack([later[near], earlier[near]], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[:, 0], pairs[:, 1]


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N] bits by which the most different frame differs, of [N, F] hashes."""
    return ONES[(a ^ b).view(np.uint16)].reshape(*a.shape, 4).sum(axis=-1).max(axis=1)


def _all_pairs(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    later, earlier = np.tril_indices(count, -1)
    for start in range(0, len(later), BLOCK):
        yield later[start : start + BLOCK], earlier[start : start + BLOCK]


def _pairs_with_a_common_piece(hashes: np.ndarray, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each choice of a piece in every frame, the pairs of clips that agree in all of them."""
    edges = np.linspace(0, 64, bits + 2).astype(int)
    pieces = [(hashes >> np.uint64(low)) & np.uint64((1 << int(high - low)) - 1) for low, high in pairwise(edges)]
    for choice in product(range(bits + 1), repeat=hashes.shape[1]):
        # one number for all frames; two that are equal by chance cost one comparison
        key = np.zeros(len(hashes), np.uint64)
        for frame, piece in enumerate(choice):
            key = key * MIX + pieces[piece][:, frame]
        order = np.argsort(key, kind="stable")
        same = key[order[1:]] == key[order[:-1]]
        yield from _pairs_in_runs(order, same)


def _pairs_in_runs(order: np.ndarray, same: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (later, earlier) of rows in one run of equal keys; `same[i]`: row i + 1 of the order is like row i."""
    run = np.concatenate([[0], np.cumsum(~same)])
    at, apart = np.flatnonzero(same), 1
    while len(at):
        for start in range(0, len(at), BLOCK):
            a, b = order[at[start : start + BLOCK]], order[at[start : start + BLOCK] + apart]
            yield np.maximum(a, b), np.minimum(a, b)
        apart += 1
        at = at[at + apart < len(order)]
        at = at[run[at + apart] == run[at]]


SCORERS["duplicate"] = Duplicate()
