"""Resize or crop images, or extract frames of videos, for all rows of a table; the new files go to a folder.

    python -m tools.datasets.transform img_resize IN.csv OUT.csv --folder small --length 2160       the longer side, if larger
    python -m tools.datasets.transform img_rand_crop IN.csv OUT.csv --folder crops --height 512 --width 512
    python -m tools.datasets.transform vid_frame_extract IN.csv OUT.csv --folder frames --points 0.1 0.5 0.9
    python -m tools.datasets.transform vid_frame_extract IN.csv OUT.csv --folder frames --points_index 0 10 -1

Columns of a row are kept; `source` is the file it is from. It and `path` are relative to the new table's folder where they lie
below it, else absolute. Files that cannot be read are counted and left out, with the
reason, in OUT_dropped.csv. Videos are made smaller by tools.scene_cut.cut.
"""

import argparse
import functools
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from PIL import Image

from opensora.datasets.video.files import is_image
from opensora.datasets.video.read_video import open_clip
from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser
from tools.datasets.datautil.parallel import default_workers, map_rows
from tools.datasets.stream import columns_of
from tools.footage.rows import Row, read_rows, refuse_existing, shortened, shown_from, write_rows

QUALITY = 95  # of JPEG
BLOCK = 1 << 14  # rows in memory at a time
Made = list[Row] | str


def img_resize(path: Path, target: Path, length: int) -> Made:
    """The longer side is brought down to `length`; smaller images keep their size."""
    image = _image(path)
    scale = min(1.0, length / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return [_save(image if scale == 1 else image.resize(size, Image.Resampling.LANCZOS), target)]


def img_rand_crop(path: Path, target: Path, height: int, width: int, seed: int) -> Made:
    """A crop of this size, drawn by the seed and the file's name."""
    image = _image(path)
    if image.height < height or image.width < width:
        return f"smaller than {height} x {width}: {image.height} x {image.width}"
    digest = hashlib.blake2b(f"{seed} {path.name}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    left, top = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
    return [_save(image.crop((left, top, left + width, top + height)), target)]


def vid_frame_extract(path: Path, target: Path, points: list[float] | None, points_index: list[int] | None) -> Made:
    """A row for each frame: at shares of the length, or by number, negative ones from the end."""
    with open_clip(path) as clip:
        last = clip.num_frames - 1
        wanted = (
            [round(p * last) for p in points]
            if points is not None
            else [i + (i < 0) * (last + 1) for i in points_index or []]
        )
        if beyond := [i for i in wanted if not 0 <= i <= last]:
            return f"has {last + 1} frames, so there is no frame {beyond[0]}"
        frames = dict(zip(sorted(set(wanted)), clip.read(sorted(set(wanted))), strict=True))
    return [
        {**_save(Image.fromarray(frames[i]), target.with_name(f"{target.stem}_frame-{i}.jpg")), "frame": i}
        for i in wanted
    ]


def _image(path: Path) -> Image.Image:
    if not is_image(path):
        raise UserError(f"{path} is no image; use vid_frame_extract.")
    with open_clip(path) as clip:
        return Image.fromarray(clip.read([0])[0])


def _save(image: Image.Image, target: Path) -> Row:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix.lower() in (".jpg", ".jpeg"):
        image.save(target, quality=QUALITY)
    else:
        image.save(target)
    size = {"height": image.height, "width": image.width, "resolution": image.height * image.width}
    return {"path": str(target), **size, "aspect_ratio": image.height / image.width, "num_frames": 1, "fps": None}


def transformed(job: tuple[Path, Path], make: Callable[[Path, Path], Made]) -> Made:
    """What a function makes of a file, or why it makes nothing."""
    try:
        return make(*job)
    except (UserError, OSError) as error:
        return str(error)


def crashed(job: tuple[Path, Path]) -> Made:
    """For a file that ended the process that read it."""
    return f"{job[0]} crashes its decoder"


def run(table: Path, out: Path, folder: Path, make: Callable[[Path, Path], Made], workers: int) -> int:
    """Transform all files of a table; returns how many rows the new one has.

    Raises:
        UserError: an output exists or is of no known format, or there is no column path.
    """
    lost = out.with_name(f"{out.stem}_dropped{out.suffix}")
    refuse_existing(table, (out, lost), "OUT")
    if "path" not in columns_of(table):
        raise UserError(f"{table} has no column 'path'.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as between:
        dropped = Path(between) / "dropped.jsonl"
        with dropped.open("w", encoding="utf-8") as file:
            made = _made(table, out.parent.absolute(), folder, make, workers, file)
            first = next(made, None)
            count = 0 if first is None else write_rows(out, itertools.chain([first], made))
        losses = sum(1 for _ in read_rows(dropped))
        example = next(read_rows(dropped), {"reason": "the table is empty"})["reason"]
        if losses:
            write_rows(lost, read_rows(dropped), [*columns_of(table), "reason"])
    if not count:
        raise UserError(f"no file could be transformed, such as: {example}")
    print(f"{out}: {count} rows")
    if losses:
        print(f"{lost}: {losses} files were left out, such as: {example}")
    return count


def _made(
    table: Path, base: Path, folder: Path, make: Callable[[Path, Path], Made], workers: int, dropped: TextIO
) -> Iterator[Row]:
    """The new rows, some thousand old ones at a time; what gives none goes to `dropped`, a JSON object a line."""
    rows = read_rows(table)
    while block := list(itertools.islice(rows, BLOCK)):
        files = [table.parent / str(row["path"]) for row in block]
        made = map_rows(
            functools.partial(transformed, make=make),
            [(file, target_of(file, folder)) for file in files],
            workers=workers,
            label="transforming",
            crashed=crashed,
        )
        for row, file, result in zip(block, files, made, strict=True):
            if earlier := row.get("duplicate_of"):
                row["duplicate_of"] = shown_from(base, (table.parent / str(earlier)).absolute())
            if isinstance(result, str):
                left_out = {**row, "path": shown_from(base, file.absolute()), "reason": result}
                dropped.write(json.dumps(left_out, ensure_ascii=False, default=str) + "\n")
            for of in result if isinstance(result, list) else ():
                path, source = (shown_from(base, each.absolute()) for each in (Path(of["path"]), file))
                yield {**row, **of, "path": path, "source": source}
    dropped.flush()


def target_of(file: Path, folder: Path) -> Path:
    """A name of its own in the folder; files in two folders may share theirs. Formats that PIL does not write become PNG."""
    digest = hashlib.blake2b(str(file.absolute()).encode(), digest_size=8).hexdigest()
    suffix = file.suffix if file.suffix.lower() in (".jpg", ".jpeg", ".png") else ".png"
    return folder / f"{shortened(file.stem)}-{digest}{suffix}"


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name in ("img_resize", "img_rand_crop", "vid_frame_extract"):
        sub = kinds.add_parser(name)
        sub.add_argument("table", type=Path)
        sub.add_argument("out", type=Path, help="the table of the new files")
        sub.add_argument("--folder", type=Path, required=True, help="of the new files")
        sub.add_argument("--num-workers", type=int, default=default_workers())
        if name == "img_resize":
            sub.add_argument("--length", type=int, default=2160, help="pixels of the longer side")
        elif name == "img_rand_crop":
            sub.add_argument("--height", type=int, default=512)
            sub.add_argument("--width", type=int, default=512)
            sub.add_argument("--seed", type=int, default=42)
        else:
            points = sub.add_mutually_exclusive_group()
            points.add_argument("--points", type=float, nargs="+", help="shares of the length, default 0.1 0.5 0.9")
            points.add_argument("--points_index", type=int, nargs="+", help="numbers of frames, negative from the end")
    return parser.parse_args()


def maker(args: argparse.Namespace) -> Callable[[Path, Path], Made]:
    """The function that a command line asks for.

    Raises:
        UserError: a number is out of range.
    """
    if args.kind == "img_resize":
        if args.length < 1:
            raise UserError("--length must be 1 or more.")
        return functools.partial(img_resize, length=args.length)
    if args.kind == "img_rand_crop":
        return functools.partial(img_rand_crop, height=args.height, width=args.width, seed=args.seed)
    points: Any = args.points if args.points or args.points_index else [0.1, 0.5, 0.9]
    if points and not all(0 <= point <= 1 for point in points):
        raise UserError("--points are shares of the length, from 0 to 1.")
    return functools.partial(vid_frame_extract, points=points, points_index=args.points_index)


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    run(args.table, args.out, args.folder, maker(args), args.num_workers)


if __name__ == "__main__":
    main()
