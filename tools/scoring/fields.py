"""Optical flow: how far each pixel of one image has moved in the next.

- "dis": Dense Inverse Search (Kroeger et al. 2016, arXiv:1603.03590), no weights, OpenCV's code at its preset "medium".
- "raft_small:FILE", "raft_large:FILE": RAFT (Teed & Deng 2020, arXiv:2003.12039) with torchvision's weights in FILE.
- "torchscript:FILE": any network, such as UniMatch, exported as a function of two batches [B, 3, H, W], 0 to 255, to flow
  [B, 2, H, W] in pixels, or to a list of flows of which the last is the best.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.scoring.frames import Pair, luma, opencv

METHODS = ("dis", "raft_small:FILE", "raft_large:FILE", "torchscript:FILE")
CELL = 8  # networks want sides that this divides
LEAST_SIDE = 128  # RAFT's coarsest correlations need 16 cells

Fields = Callable[[Sequence[Pair]], list[np.ndarray]]


@functools.cache
def flow_method(name: str, device: str = "cpu") -> Fields:
    """A function from pairs to flows [H, W, 2] float32 in pixels: (to the right, down).

    Raises:
        UserError: the method is unknown, or its file is missing or no such network.
    """
    kind, _, file = name.partition(":")
    if name == "dis":
        return _dis
    if kind not in {method.partition(":")[0] for method in METHODS} or not file:
        raise UserError(
            f"flow method {name!r} is unknown.{did_you_mean(name, list(METHODS))} One of: {', '.join(METHODS)}."
        )
    if not Path(file).is_file():
        raise UserError(f"flow method {name!r}: there is no file {file}.")
    network = _script(file, device) if kind == "torchscript" else _raft(kind, file, device)
    scale: Callable[[Tensor], Tensor] = (lambda x: x) if kind == "torchscript" else (lambda x: x / 127.5 - 1)
    return functools.partial(_by_network, network, scale, device)


def _dis(pairs: Sequence[Pair]) -> list[np.ndarray]:
    cv2 = opencv()
    search = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    grey = [[np.rint(luma(frame)).astype(np.uint8) for frame in (pair.first, pair.second)] for pair in pairs]
    return [search.calc(first, second, None) for first, second in grey]


def _script(file: str, device: str) -> Any:
    try:
        return torch.jit.load(file, map_location=device).eval()
    except RuntimeError as error:
        raise UserError(f"{file} is no TorchScript file: {str(error).splitlines()[0]}") from error


def _raft(kind: str, file: str, device: str) -> Any:
    from torchvision.models import optical_flow

    network: Any = getattr(optical_flow, kind)(weights=None)
    try:
        network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{file} holds no weights of torchvision's {kind}: {reason}") from error
    return network.requires_grad_(False).eval().to(device)


@torch.no_grad()
def _by_network(
    network: Any, scale: Callable[[Tensor], Tensor], device: str, pairs: Sequence[Pair]
) -> list[np.ndarray]:
    """All pairs at once; they are of one size, since they are of one file."""
    if not pairs:
        return []
    height, width = pairs[0].first.shape[:2]
    sides = [max(LEAST_SIDE, round(side / CELL) * CELL) for side in (height, width)]
    first, second = (
        F.interpolate(scale(_stacked(frames, device)), sides, mode="bilinear", antialias=True)
        for frames in ([pair.first for pair in pairs], [pair.second for pair in pairs])
    )
    flow = network(first, second)
    flow = flow if isinstance(flow, Tensor) else flow[-1]
    if flow.shape != (len(pairs), 2, *sides):
        raise UserError(f"the flow network returns {tuple(flow.shape)}; expected {(len(pairs), 2, *sides)}.")
    flow = F.interpolate(flow.float(), (height, width), mode="bilinear")
    flow = flow * torch.tensor([width / sides[1], height / sides[0]], device=flow.device).view(1, 2, 1, 1)
    return list(flow.permute(0, 2, 3, 1).cpu().numpy())  # [B, 2, H, W] -> B x [H, W, 2]


def _stacked(frames: Sequence[np.ndarray], device: str) -> Tensor:
    return torch.from_numpy(np.stack(frames)).to(device).permute(0, 3, 1, 2).float()  # [B, 3, H, W]
