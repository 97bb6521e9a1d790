"""Videos whose motion is known: a window that moves over an image with texture."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from scipy.ndimage import gaussian_filter, map_coordinates

SIZE = (180, 320)


def image(seed: int, height: int = 400, width: int = 560) -> np.ndarray:
    """[H, W, 3] uint8, smooth noise with details of some pixels, different for each seed."""
    noise = np.random.default_rng(seed).standard_normal((height, width, 3))
    smooth = sum(gaussian_filter(noise, (s, s, 0)) * s for s in (2, 5, 16))
    return np.clip(128 + 48 * smooth / smooth.std(), 0, 255).astype(np.uint8)


def seen(
    scene: np.ndarray, right: float = 0, down: float = 0, zoom: float = 1, size: tuple[int, int] = SIZE
) -> np.ndarray:
    """What a camera sees of a scene that has moved by so many pixels and grown by a factor, from the scene's middle."""
    y, x = np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in size), indexing="ij")
    y, x = (y - down) / zoom + (scene.shape[0] - 1) / 2, (x - right) / zoom + (scene.shape[1] - 1) / 2
    channels = [map_coordinates(scene[..., c].astype(np.float32), [y, x], order=1, mode="mirror") for c in range(3)]
    return np.clip(np.rint(np.stack(channels, -1)), 0, 255).astype(np.uint8)


def write_video(path: Path, frames: Sequence[np.ndarray], fps: int = 24, crf: int = 12) -> Path:
    """H.264 of frames [H, W, 3] uint8."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf), "threads": "1"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path
