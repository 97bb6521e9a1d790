"""`ocr`: texts in the image; `ocr_area`: the share of the image that they cover, 0 to 1.

PP-OCRv4 as the package rapidocr-onnxruntime ships it, with its weights, on the middle frame: DBNet (Liao et al. 2020,
arXiv:1911.08947) finds boxes, and a box counts when what is in it can also be read. Open-Sora counted the boxes of MMOCR's
DBNet++ with a score above 0.3; with these weights the detector alone takes branches and paws for writing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opensora.utils.errors import UserError
from tools.scoring.frames import Row, each_file, key_frames, mean, opencv, tidy
from tools.scoring.registry import SCORERS

LETTERS = 2


@dataclass(frozen=True)
class OCR:
    """`points`: shares of the clip's length at which frames are looked at; `threshold`: least certainty of what is read."""

    points: tuple[float, ...] = (0.5,)
    threshold: float = 0.6
    columns = ("ocr", "ocr_area")
    needs = ()

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """The largest number of boxes of a frame, and the mean share.

        Raises:
            UserError: rapidocr-onnxruntime is not installed.
        """
        find = finder(self.threshold)

        def measure(path: Path) -> Row:
            frames = key_frames(path, self.points)
            boxes = [find(frame) for frame in frames]
            shares = [covered(found, *frame.shape[:2]) for found, frame in zip(boxes, frames, strict=True)]
            return {"ocr": max(map(len, boxes)), "ocr_area": mean(shares)}

        return each_file(paths, self.columns, measure)


@functools.cache
def finder(threshold: float) -> Any:
    """A function from a frame [H, W, 3] uint8 to boxes, each [4, 2] in pixels.

    Raises:
        UserError: the package is not there.
    """
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise UserError(
            f"the scorer ocr needs a package ({error}): pip install rapidocr-onnxruntime, which brings its weights."
        ) from error
    engine = RapidOCR(text_score=threshold, intra_op_num_threads=1)

    def find(frame: np.ndarray) -> list[np.ndarray]:
        found, _ = engine(np.ascontiguousarray(frame[..., ::-1]), use_det=True, use_cls=False, use_rec=True)
        return [np.array(box, np.float32).reshape(4, 2) for box, text, _ in found or [] if has_letters(text)]

    return find


def has_letters(text: str) -> bool:
    """Whether a reading is more than dashes, dots and single strokes, which edges are taken for."""
    return len("".join(filter(str.isalnum, text))) >= LETTERS


def covered(boxes: Sequence[np.ndarray], height: int, width: int) -> float:
    """The share of an image that boxes cover together: where they overlap it counts once."""
    mask = np.zeros((height, width), np.uint8)
    for box in boxes:
        opencv().fillPoly(mask, [np.rint(box).astype(np.int32)], 1)
    return tidy(float(mask.mean()))


SCORERS["ocr"] = OCR()
