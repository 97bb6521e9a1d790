"""Make the set on which the small video VAE is trained: short clips and photographs, small enough to take along.

    python -m assets.build.fetch_sources --out data/sources
    python -m assets.build.collect_clips --out data/vae @assets/build/clips.txt

A SOURCE is a video, an image, a gzipped one of either, or a folder of them; a line of an @file is one argument. Of a
video, runs of consecutive frames are taken, evenly spaced over it, shrunk to a short side of 192 pixels and written as
H.264; of a image, a JPEG. Written are `train.csv`, `train_all.csv` (with the sources named by --also, which are the
quickstart's own clips) and `held_out.csv`: columns path, num_frames, source. The clips are for training, not for publishing:
the licences of their sources differ.
"""

import argparse
import csv
import gzip
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from assets.build.collect_images import VIDEOS, Parser, find, kind, opened, real_name, still_images
from opensora.datasets.transforms import resize, to_float
from opensora.datasets.video.read_video import probe, read_frames
from opensora.inference.output import save_sample
from opensora.utils.errors import exit_on_user_error

CRF = "17"
QUALITY = 92
RUN = 64  # frames
EVEN = 2  # H.264 halves the colour planes


def runs(num_frames: int, at_most: int) -> Iterator[tuple[int, int]]:
    """(first frame, length) of runs of `RUN` frames, evenly spaced, `at_most` frames together; the whole if it is short."""
    count = max(1, min(num_frames, at_most) // RUN)
    length = min(num_frames, RUN if num_frames >= RUN else num_frames)
    if num_frames <= at_most and count == 1:
        length = num_frames
    for number in range(count):
        first = 0 if count == 1 else number * (num_frames - length) // (count - 1)
        yield first, length


def shrunk(frames: Tensor, short_side: int) -> Tensor:
    """[T, H, W, 3] uint8 with a short side of at most `short_side` and even sides."""
    height, width = frames.shape[1:3]
    scale = min(short_side / min(height, width), 1.0)
    return resize(frames, (round(height * scale / EVEN) * EVEN, round(width * scale / EVEN) * EVEN))


def clips(path: Path, args: argparse.Namespace) -> Iterator[tuple[Tensor, float]]:
    """Runs of frames [T, H, W, 3] uint8 of a video, and its rate."""
    with tempfile.TemporaryDirectory() as folder:
        file = path
        if path.suffix == ".gz":
            file = Path(folder) / real_name(path)
            with gzip.open(path) as packed, file.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        info = probe(file)
        for first, length in runs(info.num_frames, args.frames.get(real_name(path), args.per_clip)):
            yield shrunk(read_frames(file, first, length), args.short_side), info.fps


def images(path: Path, short_side: int) -> Iterator[Image.Image]:
    """The images of one photograph; see `collect_images`."""
    yield from (image for image in still_images(opened(path), short_side) if min(image.size) >= 128)


def write_source(path: Path, number: int, args: argparse.Namespace) -> Iterator[dict[str, str | int]]:
    """Write what one source gives; its rows of the tables."""
    name = f"{number:03d}_{Path(real_name(path)).stem}"
    if kind(path) in VIDEOS:
        for index, (frames, fps) in enumerate(clips(path, args)):
            file = save_sample(to_float(frames), args.out / "clips" / f"{name}_{index:02d}", fps, crf=CRF)
            yield {"path": f"clips/{file.name}", "num_frames": len(frames), "source": real_name(path)}
        return
    for index, image in enumerate(images(path, args.short_side)):
        file = args.out / "images" / f"{name}_{index:02d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file, quality=QUALITY)
        yield {"path": f"images/{file.name}", "num_frames": 1, "source": real_name(path)}


@exit_on_user_error
def main() -> None:
    """Collect, write, count."""
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--out", type=Path, default=Path("data/vae"))
    parser.add_argument("--held-out", nargs="+", default=[], metavar="NAME", help="source files never trained on")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME", help="source files of train_all.csv only")
    parser.add_argument("--short-side", type=int, default=192, help="in pixels")
    parser.add_argument("--per-clip", type=int, default=256, help="frames that one video gives at most")
    parser.add_argument("--frames", nargs="+", default=[], metavar="NAME=N", help="the same for single videos")
    args = parser.parse_args()
    args.frames = {name: int(number) for name, _, number in (item.rpartition("=") for item in args.frames)}
    torch.set_num_threads(1)

    files = find(args.sources)
    if missing := {*args.held_out, *args.also} - {real_name(path) for path in files}:
        parser.error(f"files that are not among the sources: {', '.join(sorted(missing))}")
    tables: dict[str, list[dict[str, str | int]]] = {"train": [], "train_all": [], "held_out": []}
    for number, path in enumerate(files):
        rows = list(write_source(path, number, args))
        if real_name(path) in args.held_out:
            tables["held_out"] += rows
            continue
        tables["train_all"] += rows
        tables["train"] += rows if real_name(path) not in args.also else []
    for name, rows in tables.items():
        with (args.out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["path", "num_frames", "source"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        frames = sum(int(row["num_frames"]) for row in rows)
        print(f"{name}: {len(rows)} files, {frames} frames, {len({row['source'] for row in rows})} sources")
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{size / 1e6:.1f} MB in {args.out}")


if __name__ == "__main__":
    main()
