"""The CLIP model that `aesthetic` and `matching` look at frames with."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from opensora.datasets.transforms import to_float
from tools.eval.text_similarity import Clip
from tools.scoring.frames import key_frames


@functools.cache
def clip_model(folder: str, device: str) -> Clip:
    """The model of a folder or hub id, loaded once.

    Raises:
        UserError: it cannot be loaded.
    """
    return Clip(folder, device)


def pixels_of(clip: Clip, path: Path, points: Sequence[float]) -> Tensor:
    """[N, 3, size, size] in [0, 1], frames at these shares of a clip's length, as the model wants them.

    Raises:
        BadFile: the file cannot be read.
    """
    frames = [torch.from_numpy(frame)[None] for frame in key_frames(path, points)]  # [1, H, W, 3]
    return torch.cat([clip.preprocess(to_float(frame)) for frame in frames])
