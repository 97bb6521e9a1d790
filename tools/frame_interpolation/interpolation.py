"""Put frames between those of a video: 2^n (m - 1) + 1 of m frames, at any rate.

    python -m tools.frame_interpolation.interpolation clip.mp4 --output_path smooth.mp4 --niter 1 --fps 48
    python -m tools.frame_interpolation.interpolation clip.mp4 --output_path smooth.mp4 --ckpt amt.torchscript

Without --ckpt: dense optical flow (DIS, Kroeger et al. 2016, arXiv:1603.03590, OpenCV's) both ways, both frames moved to the
middle, and there blended; where the two then agree less than they did unmoved, as behind what moves, they are left unmoved.
With --ckpt: a TorchScript module from two frames [1, 3, H, W] in [0, 1] to the one in the middle.
"""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from opensora.datasets.video.color import reformat
from opensora.inference.output import exact_fps
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import progress_bar
from tools.command import Parser
from tools.scene_cut.frames import Footage
from tools.scoring.frames import opencv

Middle = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Two frames [H, W, 3] uint8 to the one between them."""
AROUND = 9  # pixels over which two images are compared


class FlowMiddle:
    """By optical flow; without weights."""

    def __init__(self) -> None:
        cv = opencv()
        self._flow = cv.DISOpticalFlow_create(cv.DISOPTICAL_FLOW_PRESET_MEDIUM)

    def __call__(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        grey = [opencv().cvtColor(frame, opencv().COLOR_RGB2GRAY) for frame in (one, other)]
        forth, back = self._flow.calc(grey[0], grey[1], None), self._flow.calc(grey[1], grey[0], None)  # [H, W, 2]
        # the flow at a pixel of the middle frame is taken to be that of the same pixel in the frames
        moved, still = (_moved(one, -forth / 2), _moved(other, -back / 2)), (one.astype(np.float32), other)
        wrong, wrong_still = _apart(*moved), _apart(*still)
        share = (wrong_still**3 / (wrong**3 + wrong_still**3))[..., None]  # of what was moved
        middle = share * (moved[0] + moved[1]) / 2 + (1 - share) * (still[0] + still[1]) / 2
        return np.rint(middle).clip(0, 255).astype(np.uint8)


def _moved(image: np.ndarray, by: np.ndarray) -> np.ndarray:
    """What is at x + by(x), [H, W, C] float32."""
    height, width = by.shape[:2]
    x, y = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    cv = opencv()
    moved: np.ndarray = cv.remap(
        image.astype(np.float32), x + by[..., 0], y + by[..., 1], cv.INTER_LINEAR, borderMode=cv.BORDER_REPLICATE
    )
    return moved


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[H, W] how far two images differ around each pixel, above 0."""
    apart: np.ndarray = opencv().blur(np.abs(one - other).mean(-1), (AROUND, AROUND)) + 1e-3
    return apart


class LearnedMiddle:
    """By a TorchScript module."""

    def __init__(self, path: Path, device: str) -> None:
        import torch

        try:
            self._module: Any = torch.jit.load(str(path), map_location=device).eval()
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--ckpt {path} is no TorchScript file: {str(error).splitlines()[0]}") from error
        self._device = device

    def __call__(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        import torch

        frames = [torch.from_numpy(f).to(self._device).permute(2, 0, 1)[None].float() / 255 for f in (one, other)]
        with torch.no_grad():
            middle = self._module(*frames)
        if tuple(middle.shape) != tuple(frames[0].shape):
            raise UserError(f"--ckpt gives {tuple(middle.shape)} for frames of {tuple(frames[0].shape)}.")
        image: np.ndarray = (middle[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        return image


def interpolated(frames: Iterator[np.ndarray], middle: Middle, niter: int) -> Iterator[np.ndarray]:
    """2^niter (m - 1) + 1 frames of m; two of the given ones are held at a time."""
    before = next(frames)
    yield before
    for frame in frames:
        between = [before, frame]
        for _ in range(niter):
            doubled = [between[0]]
            for one, other in itertools.pairwise(between):
                doubled += [middle(one, other), other]
            between = doubled
        yield from between[1:]
        before = frame


def write(target: Path, frames: Iterator[np.ndarray], rate: Fraction) -> int:
    """Encode frames one by one, H.264 in BT.709; returns how many."""
    count = 0
    partial = target.with_name(f".{target.stem}.partial.mp4")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with av.open(str(partial), "w", options={"movflags": "+faststart"}) as output:
            stream = output.add_stream("libx264", rate=rate, options={"crf": "17"})
            for count, frame in enumerate(frames, start=1):
                if count == 1:
                    stream.height, stream.width = (2 * round(side / 2) for side in frame.shape[:2])
                    stream.pix_fmt = "yuv420p"
                    context = stream.codec_context
                    context.colorspace = context.color_primaries = context.color_trc = context.color_range = 1  # BT.709
                image = reformat(
                    av.VideoFrame.from_ndarray(frame, format="rgb24"),
                    width=stream.width,
                    height=stream.height,
                    format="yuv420p",
                    dst_colorspace="ITU709",
                    interpolation="AREA",
                )
                image.pts, image.time_base = count - 1, 1 / rate
                output.mux(stream.encode(image))
            output.mux(stream.encode())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def run(source: Path, target: Path, niter: int, fps: float | None, middle: Middle) -> int:
    """Interpolate a file; returns the number of frames written.

    Args:
        fps: of the output; None = such that it lasts as long as the source.

    Raises:
        UserError: the target is no .mp4, or the source cannot be read.
    """
    if target.suffix.lower() != ".mp4":
        raise UserError(f"--output_path {target}: an .mp4 is written.")
    if niter < 1 or (fps is not None and fps <= 0):
        raise UserError("--niter must be 1 or more, and --fps positive.")
    footage = Footage(source)
    shown = progress_bar(footage.frames(), total=footage.num_frames, desc="interpolating", unit="frame")
    frames = (footage.rgb(timed.frame) for timed in shown)
    rate = exact_fps(fps if fps is not None else _kept_rate(footage) * 2**niter)
    return write(target, interpolated(frames, middle, niter), rate)


def _kept_rate(footage: Footage) -> float:
    """The constant rate at which the last frame is shown when it is shown in the video, whose rate may vary."""
    steps, last = footage.num_frames - 1, float(footage.times()[-2])  # the last number is the end
    # times are rounded: a rate within one tick is the better-known number
    if not steps or abs(steps / footage.fps - last) <= footage.timeline.time_base:
        return footage.fps
    return steps / last


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("input", type=Path, help="a video")
    parser.add_argument("--output_path", type=Path, help="an .mp4 (default: NAME_x2.mp4 next to the input)")
    parser.add_argument("--niter", type=int, default=1, help="how often frames are doubled")
    parser.add_argument("--fps", type=float, help="of the output (default: it lasts as long as the input)")
    parser.add_argument("--ckpt", type=Path, help="a TorchScript module")
    parser.add_argument("--device", default="cpu", help="of --ckpt")
    args = parser.parse_args()
    middle: Middle = LearnedMiddle(args.ckpt, args.device) if args.ckpt else FlowMiddle()
    target = args.output_path or args.input.with_name(f"{args.input.stem}_x{2**args.niter}.mp4")
    if target.resolve() == args.input.resolve():
        raise UserError("--output_path is the input itself.")
    print(f"{target}: {run(args.input, target, args.niter, args.fps, middle)} frames")


if __name__ == "__main__":
    main()
