"""Make the image set on which the small image VAE is trained, from videos and photographs inside packages.

    python -m assets.build.fetch_sources --out data/sources
    python -m assets.build.collect_images --out data/images @assets/build/images.txt

A SOURCE is a video, an image, a gzipped one of either, or a folder of them. A line of an @file is one argument;
empty lines and lines that start with # are skipped; `images.txt` next to this script lists the files that are
worth taking. Written are JPEG files, `train.csv` and `held_out.csv` (columns path, source). A clip is sampled
evenly, frames that hardly differ from the last one kept are skipped, and a large photograph also gives tiles.
Images are only ever made smaller (area average).
"""

import argparse
import csv
import gzip
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageOps

from opensora.datasets.video.color import upright
from opensora.utils.errors import exit_on_user_error

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".ppm", ".avif"}
VIDEOS = {".mp4", ".avi", ".webm", ".mpg", ".mpeg", ".mov", ".mkv"}
SMALLEST = 96  # a training crop must fit
QUALITY = 93
SAME = 1.2  # mean difference, out of 255, of 32x32 thumbnails below which two frames are near-duplicates


class Parser(argparse.ArgumentParser):
    """Argument parser whose @files may hold comments and empty lines."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        line = arg_line.strip()
        return [line] if line and not line.startswith("#") else []


def real_name(path: Path) -> str:
    """The file's name without .gz."""
    return path.name.removesuffix(".gz")


def kind(path: Path) -> str:
    """The file's lower-case suffix without .gz."""
    return Path(real_name(path)).suffix.lower()


def find(sources: list[Path]) -> list[Path]:
    """All images and videos among the sources, folders walked in sorted order."""
    files: list[Path] = []
    for source in sources:
        found = sorted(source.rglob("*")) if source.is_dir() else [source]
        files += [path for path in found if path.is_file() and kind(path) in IMAGES | VIDEOS]
        if not source.exists():
            print(f"{source}: not there, left out", file=sys.stderr)
    return list(dict.fromkeys(files))


def opened(path: Path) -> io.BytesIO:
    """The file's bytes, gunzipped where needed."""
    data = path.read_bytes()
    return io.BytesIO(gzip.decompress(data) if path.suffix == ".gz" else data)


def shrunk(image: Image.Image, short_side: int) -> Image.Image:
    """The image with its short side at most `short_side`, area-averaged."""
    scale = short_side / min(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BOX)


def still_images(file: io.BytesIO, short_side: int) -> Iterator[Image.Image]:
    """The photograph itself, and tiles of it where it is at least twice as large as wanted."""
    image = ImageOps.exif_transpose(Image.open(file))
    if "A" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    yield shrunk(image, short_side)
    if min(image.size) < 2 * short_side:
        return
    for scale in (2, 4):
        if min(image.size) >= scale * short_side:
            yield from _tiles(shrunk(image, scale * short_side), short_side, scale)


def _tiles(image: Image.Image, short_side: int, per_side: int) -> Iterator[Image.Image]:
    """Square tiles of the image, `per_side` to a side, those without detail left out."""
    for row in range(per_side):
        for column in range(per_side):
            left = column * (image.width - short_side) // (per_side - 1)
            top = row * (image.height - short_side) // (per_side - 1)
            tile = image.crop((left, top, left + short_side, top + short_side))
            if _thumbnail(tile).std(axis=(0, 1)).max() > SAME:
                yield tile


def video_frames(file: io.BytesIO, short_side: int, at_most: int) -> Iterator[Image.Image]:
    """Evenly spaced frames of a clip, near-duplicates left out."""
    with av.open(file, mode="r") as container:
        count = sum(packet.size > 0 for packet in container.demux(video=0))
    step = max(1, math.ceil(count / at_most))
    file.seek(0)
    last = np.full((32, 32, 3), -255.0)
    with av.open(file, mode="r") as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index % step:
                continue
            image = shrunk(_upright(frame), short_side)
            thumbnail = _thumbnail(image)
            if np.abs(thumbnail - last).mean() >= SAME:
                last = thumbnail
                yield image


def _upright(frame: av.VideoFrame) -> Image.Image:
    """The frame as a image, with its matrix guessed as players do, the way it is displayed."""
    untagged_hd = frame.colorspace == av.video.reformatter.Colorspace.DEFAULT and frame.height >= 720
    rgb = frame.to_ndarray(format="rgb24", src_colorspace="ITU709" if untagged_hd else None)
    return Image.fromarray(upright(frame, rgb))


def _thumbnail(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((32, 32), Image.Resampling.BOX), dtype=np.float64)


def collect(path: Path, args: argparse.Namespace) -> Iterator[Image.Image]:
    """The images of one source file that are large enough."""
    if kind(path) in VIDEOS:
        images = video_frames(opened(path), args.video_short_side, args.frames.get(real_name(path), args.per_clip))
    else:
        images = still_images(opened(path), args.short_side)
    yield from (image for image in images if min(image.size) >= SMALLEST)


@exit_on_user_error
def main() -> None:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--out", type=Path, default=Path("data/images"))
    parser.add_argument("--held-out", nargs="+", default=[], metavar="NAME", help="source files never trained on")
    parser.add_argument("--short-side", type=int, default=256, help="of photographs, in pixels")
    parser.add_argument("--video-short-side", type=int, default=192, help="of frames, in pixels")
    parser.add_argument("--per-clip", type=int, default=150, help="frames that one clip gives at most")
    parser.add_argument("--frames", nargs="+", default=[], metavar="NAME=N", help="the same for single clips")
    args = parser.parse_args()
    args.frames = {name: int(number) for name, _, number in (item.rpartition("=") for item in args.frames)}

    files = find(args.sources)
    if missing := set(args.held_out) - {real_name(path) for path in files}:
        parser.error(f"--held-out names files that are not among the sources: {', '.join(sorted(missing))}")
    args.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    size = 0
    for number, path in enumerate(files):
        split = "held_out" if real_name(path) in args.held_out else "train"
        folder = args.out / split
        folder.mkdir(exist_ok=True)
        for index, image in enumerate(collect(path, args)):
            target = folder / f"{number:03d}_{Path(real_name(path)).stem}_{index:03d}.jpg"
            image.save(target, quality=QUALITY)
            size += target.stat().st_size
            tables[split].append({"path": target.relative_to(args.out).as_posix(), "source": real_name(path)})
    for split, rows in tables.items():
        with (args.out / f"{split}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["path", "source"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{split}: {len(rows)} images of {len({row['source'] for row in rows})} sources")
    print(f"{size / 1e6:.1f} MB in {args.out}")


if __name__ == "__main__":
    main()
