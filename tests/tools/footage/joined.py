"""A long video made of the shipped clips."""

from pathlib import Path

import av
import numpy as np

import opensora.models  # noqa: F401  (registers)
from opensora.datasets.video.read_video import read_frames

CLIPS = Path(__file__).parents[3] / "assets" / "clips"


def join(path: Path, names: list[str]) -> None:
    """A long video of shipped clips, 24 frames of each; of one with a * the first frame, 24 times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "10", "preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = 144, 176, "yuv420p"
        for name in names:
            frames = read_frames(CLIPS / f"{name.rstrip('*')}.mp4", 0, 24).numpy()
            for frame in frames[:1].repeat(24, 0) if name.endswith("*") else frames:
                crop = np.ascontiguousarray(frame[:144, :176])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(crop, format="rgb24")))
        container.mux(stream.encode())
