"""Time decoding to RGB, of random clips and in order, with ours and with what is installed beside it.

    python -m tools.benchmark.decode [FILE ...] [--readers opensora decord opencv] [--seconds 4]

Each reader runs in this process with one thread. A clip is read as by a data loader whose files never repeat: open the file,
seek and decode 16 frames at interval 3 from a random start, with nothing remembered from the clip before. In order, the first 120
frames are decoded. Times are processor time of the process, all its threads together, so that other programs on the machine
hardly matter. Rounds of the readers alternate; the table has the median of rounds, and their range. Frames are compared with
ours: a reader that gives other frames is not faster.

Without files it takes assets/clips. decord and opencv are compared where they are installed, torchcodec where it also finds
FFmpeg's libraries; none of them is needed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from opensora.datasets.video import timeline
from opensora.datasets.video.files import Decoding
from opensora.datasets.video.read_video import open_clip, probe, read_frames
from opensora.utils.errors import UserError, exit_on_user_error

CLIPS = Path("assets/clips")
NUM_FRAMES, INTERVAL, ROUNDS = 16, 3, 3
COMPARED = 5  # clips
MAX_WHOLE = 120  # frames: more would be as fast, and fill the memory
PACKAGES = {
    "opensora": "av",
    "opensora-fast": "av",
    "torchcodec": "torchcodec",
    "decord": "decord",
    "opencv": "opencv-python-headless",
}

Reader = Callable[[str, Sequence[int]], np.ndarray]  # path, indices -> [T, H, W, 3] uint8


def read_with_opensora(path: str, indices: Sequence[int]) -> np.ndarray:
    """Ours, with nothing remembered."""
    timeline._known.clear()
    with open_clip(path) as clip:
        return np.stack(clip.read(indices))


def read_with_fast_colors(path: str, indices: Sequence[int]) -> np.ndarray:
    """Ours, with the conversion that the others use."""
    timeline._known.clear()
    with open_clip(path, Decoding(colors="fast")) as clip:
        return np.stack(clip.read(indices))


def read_with_torchcodec(path: str, indices: Sequence[int]) -> np.ndarray:
    """Our torchcodec backend."""
    timeline._known.clear()
    with open_clip(path, Decoding("torchcodec", "refuse", "keep", "fast")) as clip:
        return np.stack(clip.read(indices))


def read_with_decord(path: str, indices: Sequence[int]) -> np.ndarray:
    """decord's batches."""
    import decord

    return decord.VideoReader(path, num_threads=1).get_batch(list(indices)).asnumpy()


def read_with_opencv(path: str, indices: Sequence[int]) -> np.ndarray:
    """OpenCV: seek to the first frame, grab all, convert the wanted ones."""
    import cv2

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    capture.set(cv2.CAP_PROP_POS_FRAMES, indices[0])
    wanted, frames = set(indices), []
    for index in range(indices[0], indices[-1] + 1):
        if not capture.grab():
            break
        if index in wanted:
            frames.append(cv2.cvtColor(capture.retrieve()[1], cv2.COLOR_BGR2RGB))
    capture.release()
    return np.stack(frames) if frames else np.empty((0, 1, 1, 3), np.uint8)


READERS: dict[str, Reader] = {
    "opensora": read_with_opensora,
    "opensora-fast": read_with_fast_colors,
    "torchcodec": read_with_torchcodec,
    "decord": read_with_decord,
    "opencv": read_with_opencv,
}


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    paths = [str(path) for path in args.files or sorted(CLIPS.glob("*.mp4"))]
    if missing := [path for path in paths if not Path(path).is_file()]:
        raise UserError(f"{missing[0]} does not exist; name video files.")
    readers = {name: READERS[name] for name in args.readers if works(name, paths[0])}
    print(", ".join(f"{name} ({package_of(name)})" for name in readers), end="; one thread each\n\n")
    print(
        f"| file | reader | ms per clip of {NUM_FRAMES} at interval {INTERVAL} | frames/s, in order | frames like ours |"
    )
    print("|---|---|---|---|---|")
    for path in paths:
        info = probe(path)
        name = f"{Path(path).name} {info.width}x{info.height}, {info.num_frames} frames"
        for reader, cells in measure(readers, path, info.num_frames, args.seconds).items():
            print(f"| {name} | {reader} | {cells} |", flush=True)


def parse_args() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each reader and kind of reading, of each file")
    return parser.parse_args()


def works(name: str, path: str) -> bool:
    """Whether a reader reads a file at all; says why not."""
    try:
        READERS[name](path, [0])
    except (ImportError, OSError, RuntimeError, UserError) as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}")
        return False
    return True


def package_of(name: str) -> str:
    """The package behind a reader, with its version."""
    for package in (PACKAGES[name], PACKAGES[name].removesuffix("-headless")):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return PACKAGES[name]


def measure(readers: dict[str, Reader], path: str, num_frames: int, seconds: float) -> dict[str, str]:
    """Cells of the table for each reader."""
    span = min((NUM_FRAMES - 1) * INTERVAL + 1, num_frames)
    clips = [range(start, start + span, INTERVAL) for start in starts(num_frames - span + 1)]
    whole_frames = min(num_frames, MAX_WHOLE)
    per_clip: dict[str, list[float]] = {name: [] for name in readers}
    per_second: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(ROUNDS):  # in turn, so that a busy moment of the machine hits all
        for name, read in readers.items():
            per_clip[name].append(1000 * time_each(read, path, clips, seconds / ROUNDS))
            per_second[name].append(whole_frames / time_each(read, path, [range(whole_frames)], seconds / ROUNDS))
    return {
        name: f"{with_range(per_clip[name])} | {with_range(per_second[name])} | {agreement(read, path, clips[-COMPARED:])}"
        for name, read in readers.items()
    }


def starts(number: int, seed: int = 0) -> list[int]:
    """Some possible starts, in random order, the last among them."""
    rng = random.Random(seed)
    return [*(rng.randrange(number) for _ in range(19)), number - 1]


def time_each(read: Reader, path: str, clips: Sequence[Sequence[int]], seconds: float) -> float:
    """Seconds of processor time for a clip: the mean of as many as fit, one at least."""
    begun, count = time.process_time(), 0
    while count == 0 or time.process_time() - begun < seconds:
        read(path, clips[count % len(clips)])
        count += 1
    return (time.process_time() - begun) / count


def agreement(read: Reader, path: str, clips: Sequence[Sequence[int]]) -> str:
    """Whether the frames of some clips are ours, but for rounding of colours."""
    off, others = [], 0
    for clip in clips:
        ours = read_frames(path, clip[0], len(clip), clip[1] - clip[0] if len(clip) > 1 else 1).numpy()
        theirs = read(path, clip)
        if theirs.shape != ours.shape:
            return f"no: shape {'x'.join(map(str, theirs.shape))}"
        distance = [difference(a, b) for a, b in zip(theirs, ours, strict=True)]
        # frames of a still scene hardly differ: the right one must be nearer than the one before
        others += sum(difference(theirs[i], ours[i - 1]) < distance[i] for i in range(1, len(ours)))
        off += distance
    total = sum(map(len, clips))
    return f"no: {others} of {total} are others" if others else f"yes, off by {statistics.mean(off):.1f}/255"


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Mean absolute difference of two pictures."""
    return float(np.abs(a.astype(np.int16) - b).mean())


def with_range(values: Sequence[float]) -> str:
    """The median, and the least and the largest."""
    return f"{statistics.median(values):.4g} [{min(values):.3g}-{max(values):.3g}]"


if __name__ == "__main__":
    main()
