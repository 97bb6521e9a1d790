"""A folder of videos or images -> a table: path, id, relpath, and text and label where they are known.

    python -m tools.datasets.convert video FOLDER --output clips.csv --info
    python -m tools.datasets.convert image FOLDER --output images.csv --captions txt
    python -m tools.datasets.convert captioned FOLDER --output clips.csv                   clip.mp4 and clip.txt; what can be trained on
    python -m tools.datasets.convert classes FOLDER --split train --output train.csv       CLASS/image.jpg
    python -m tools.datasets.convert imagenet FOLDER --split val --output val.csv          n01440764/image.JPEG
    python -m tools.datasets.convert ucf101 FOLDER --split trainlist01.txt --output u.csv  ApplyEyeMakeup/clip.avi
    python -m tools.datasets.convert vidprom FOLDER --info VidProM_unique.csv --output v.csv

The table is CSV, JSONL or parquet, by its extension. `label` is the number of a class for the text encoder "classes".
What is left out of the table is counted by reason. docs/how-to/data-tools.md has examples.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from opensora.datasets.image_folder import class_folders
from opensora.datasets.table.files import read_frame, table_format
from opensora.datasets.table.folder import SHOWN_REASONS, SIDECARS, find_files, read_captions
from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, TooFewFrames
from opensora.datasets.video.read_video import read_frames
from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser
from tools.datasets.datautil.info import OK, Measured, add_info, crashed, measure
from tools.datasets.datautil.io import write_frames
from tools.datasets.datautil.operations import TableState
from tools.datasets.datautil.parallel import default_workers, map_rows
from tools.datasets.datautil.paths import relative
from tools.datasets.datautil.text import load_caption

EXTENSIONS = {"video": VIDEO_EXTENSIONS, "image": IMAGE_EXTENSIONS}
DECODED = 16  # frames at a time


def run(argv: Sequence[str] | None = None) -> Path:
    """Carry out a command line; returns the table that was written.

    Raises:
        UserError: the folder or the output is not as it must be.
    """
    args = read_arguments(argv)
    name = f"{args.kind}s" if args.kind in EXTENSIONS else args.kind  # as Open-Sora named it
    split = f"_{Path(args.split).stem}" if getattr(args, "split", None) else ""
    output = Path(args.output or f"{name}{split}.csv")
    table_format(output)
    if output.exists() and not args.overwrite:
        raise UserError(f"{output} exists; name another --output, or pass --overwrite.")
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder.")
    frame, left_out = KINDS[args.kind](folder, args)
    if args.paths == "relative":
        frame["path"] = relative(frame["path"], folder, output.parent)
    table = TableState(frame, output.parent, workers=args.num_workers or default_workers())
    for message in _left_out_lines(left_out):
        print(message)
    if getattr(args, "captions", None):
        result = load_caption(table, args.captions)
        table = result.table
        print(f"--captions {args.captions}: {result.note}")
    if args.info is True:
        result = add_info(table, None)
        table = result.table
        print(f"--info: {result.note}")
    write_frames([table.frame], [output])
    print(f"{output}: {len(table)} rows; columns {', '.join(table.frame.columns)}")
    return output


def _left_out_lines(left_out: Counter[str]) -> Iterator[str]:
    left_out = +left_out  # without zeros
    shown = left_out.most_common(SHOWN_REASONS)
    for reason, count in shown:
        yield f"left out: {count} {reason}"
    if rest := left_out.total() - sum(count for _, count in shown):
        yield f"left out: {rest} others"


def _table(folder: Path, files: Sequence[Path], **columns: Sequence[object]) -> pd.DataFrame:
    """Absolute paths, the file's name without its extension, its path in `folder`, and other columns."""
    return pd.DataFrame(
        {
            "path": pd.Series([str(path.absolute()) for path in files], dtype=object),
            "id": pd.Series([path.stem for path in files], dtype=object),
            "relpath": pd.Series([path.relative_to(folder).as_posix() for path in files], dtype=object),
            **{name: pd.Series(list(column)) for name, column in columns.items()},
        }
    )


# ---------------------------------------------------------------------------------------------------- kinds

Made = tuple[pd.DataFrame, Counter[str]]


def convert_files(folder: Path, args: argparse.Namespace) -> Made:
    """All videos, or all images, of a folder."""
    found = find_files(folder, EXTENSIONS[args.kind])
    return _table(folder, found.files), found.left_out


def convert_captioned(folder: Path, args: argparse.Namespace) -> Made:
    """All videos and images that have a caption and can be decoded: path, text, num_frames, height, width, fps."""
    found = find_files(folder, VIDEO_EXTENSIONS + IMAGE_EXTENSIONS)
    captions = [caption or (args.caption or "").strip() for caption in read_captions(folder, found.files)]
    files = [path for path, caption in zip(found.files, captions, strict=True) if caption]
    info = map_rows(decoded, files, workers=args.num_workers or default_workers(), label="decoding", crashed=crashed)
    status = {path: measured.status for path, measured in zip(files, info, strict=True)}
    left_out = [f"{path}: it has no caption" for path in found.files if path not in status]
    left_out += [why for why in status.values() if why != OK]
    for why in left_out:
        print(f"left out: {why}")
    if len(left_out) == len(found.files):
        raise UserError(
            f"{folder}: no file is left. A caption is in a text file of the same name (clip.txt for clip.mp4), or in captions.csv with "
            "the columns path and text; --caption TEXT is for all files that have none."
        )
    rows = [
        (str(path.absolute()), caption, *measured[:4])
        for path, caption, measured in zip(files, filter(None, captions), info, strict=True)
        if measured.status == OK
    ]
    columns = zip(*rows, strict=True)
    types = {
        "path": object,
        "text": object,
        "num_frames": "Int64",
        "height": "Int64",
        "width": "Int64",
        "fps": "Float64",
    }
    frame = pd.DataFrame(
        {name: pd.Series(list(cells), dtype=types[name]) for name, cells in zip(types, columns, strict=True)}
    )
    sidecars = {f".{kind} files": 0 for kind in SIDECARS}
    return frame, Counter({**found.left_out, **sidecars})


def decoded(path: Path) -> Measured:
    """What a file is, and why it cannot be read, when all of its frames were decoded; raises nothing."""
    info = measure(path)
    if info.status != OK:
        return info
    total = info.num_frames or 1
    try:
        for start in range(0, total, DECODED):
            read_frames(path, start, min(DECODED, total - start))
    except TooFewFrames as error:
        if error.available:  # packets that hold no frame
            return info._replace(num_frames=error.available)
        return info._replace(status=str(error))
    except UserError as error:
        return info._replace(status=str(error))
    return info


def convert_classes(folder: Path, args: argparse.Namespace) -> Made:
    """CLASS/.../file: the text is the folder's name, the label its number in the order of names."""
    return _by_class(folder, args.split, IMAGE_EXTENSIONS + VIDEO_EXTENSIONS, lambda name: name.replace("_", " "))


def convert_imagenet(folder: Path, args: argparse.Namespace) -> Made:
    """n01440764/image.JPEG: label and words of ImageNet's 1000 classes, also for a part of them."""
    from timm.data import ImageNetInfo

    imagenet = ImageNetInfo()
    numbers = {name: i for i, name in enumerate(imagenet.label_names())}
    frame, left_out = _by_class(folder, args.split, IMAGE_EXTENSIONS, str)
    if unknown := sorted(set(frame["text"]) - numbers.keys()):
        raise UserError(
            f"{folder}: {unknown[0]!r} is not one of ImageNet's 1000 classes, whose folders have names such as "
            "n01440764; for other class folders use `convert classes`."
        )
    labels = frame["text"].map(numbers)
    words = labels.map(lambda label: imagenet.index_to_description(label))
    return frame.assign(text=words.astype(object), label=labels), left_out


def convert_ucf101(folder: Path, args: argparse.Namespace) -> Made:
    """ApplyEyeMakeup/clip.avi: the text is "Apply Eye Makeup", the label its number in the order of names."""
    return _by_class(folder, args.split, VIDEO_EXTENSIONS, lambda name: re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))


def _by_class(folder: Path, split: str | None, extensions: Sequence[str], words: Callable[[str], str]) -> Made:
    """Files in class folders. `split`: a folder between, or a list of files such as UCF101's trainlist01.txt."""
    listed = None
    if split is not None and (folder / split).is_dir():
        folder = folder / split
    elif split is not None:
        listed = _read_split(folder, split)
    classes = class_folders(folder)
    found = find_files(folder, extensions)
    names = [path.relative_to(folder).parts for path in found.files]
    wanted = [len(parts) > 1 and (listed is None or "/".join(parts) in listed) for parts in names]
    left_out = found.left_out + Counter(
        {
            "files in no class folder": sum(len(parts) == 1 for parts in names),
            f"files that {split} does not name": sum(len(p) > 1 and not w for p, w in zip(names, wanted, strict=True)),
        }
    )
    if listed is not None and (absent := len(listed) - sum(wanted)):
        left_out[f"lines of {split} whose files do not exist"] = absent
    files = [path for path, take in zip(found.files, wanted, strict=True) if take]
    if not files:
        raise UserError(f"{folder}: no file is left (split {split}).")
    owners = [path.relative_to(folder).parts[0] for path in files]
    numbers = {name: i for i, name in enumerate(classes)}
    frame = _table(folder, files, text=[words(name) for name in owners], label=[numbers[name] for name in owners])
    frame["text"] = frame["text"].astype(object)
    return frame, left_out


def _read_split(folder: Path, split: str) -> set[str]:
    """The files of a list: one a line, CLASS/file, a class number behind it if there is one."""
    path = next((path for path in (Path(split), folder / split) if path.is_file()), None)
    if path is None:
        inner = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise UserError(
            f"--split {split}: neither a folder in {folder} nor a file; its folders: {', '.join(inner[:5])}."
        )
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return {re.sub(r"\s+\d+$", "", line.strip()) for line in lines if line.strip()}


def convert_vidprom(folder: Path, args: argparse.Namespace) -> Made:
    """pika-UUID.mp4 and the like: the text is the prompt of that UUID in VidProM's own table."""
    info = read_frame(Path(args.info))
    if missing := [name for name in ("uuid", "prompt") if name not in info.columns]:
        raise UserError(f"{args.info} has no column {missing[0]!r}; its columns are: {', '.join(info.columns)}.")
    prompts = dict(zip(info["uuid"], info["prompt"], strict=True))
    found = find_files(folder, VIDEO_EXTENSIONS)
    uuids = [re.sub(r"^[A-Za-z0-9]+-(?=[0-9a-fA-F]{8}-)", "", path.stem) for path in found.files]
    known = [uuid in prompts for uuid in uuids]
    if not any(known):
        raise UserError(f"{args.info} names none of the {len(uuids)} videos in {folder}; names are like pika-UUID.mp4.")
    files = [path for path, take in zip(found.files, known, strict=True) if take]
    texts = [str(prompts[uuid]) for uuid, take in zip(uuids, known, strict=True) if take]
    left_out = found.left_out + Counter({f"videos that {Path(args.info).name} does not name": known.count(False)})
    frame = _table(folder, files, text=texts)
    frame["text"] = frame["text"].astype(object)
    return frame, left_out


KINDS: dict[str, Callable[[Path, argparse.Namespace], Made]] = {
    "video": convert_files,
    "image": convert_files,
    "captioned": convert_captioned,
    "classes": convert_classes,
    "imagenet": convert_imagenet,
    "ucf101": convert_ucf101,
    "vidprom": convert_vidprom,
}


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, __spec__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{" + ",".join(KINDS) + "}")
    for kind, function in KINDS.items():
        line = (function.__doc__ or "").splitlines()[0]
        sub = kinds.add_parser(kind, help=line, description=line)
        sub.add_argument("folder", metavar="FOLDER")
        help_of_output = ".csv, .jsonl or .parquet (default: videos.csv, images.csv, KIND_SPLIT.csv)"
        sub.add_argument("--output", "-o", metavar="TABLE", help=help_of_output)
        sub.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
        help_of_paths = "absolute (default), or relative to the table's folder"
        sub.add_argument("--paths", choices=("absolute", "relative"), default="absolute", help=help_of_paths)
        sub.add_argument("--num-workers", type=int, metavar="N", help="processes that read files (default: one a core)")
        if kind == "captioned":
            sub.add_argument("--caption", metavar="TEXT", help="of files that have none; else they are left out")
            sub.set_defaults(info=False)
            continue
        if kind == "vidprom":
            sub.add_argument("--info", required=True, metavar="TABLE", help="VidProM's table, with uuid and prompt")
            continue
        sub.add_argument("--info", action="store_true", help="add num_frames, height, width, fps, ... and status")
        if kind in ("video", "image"):
            sub.add_argument("--captions", choices=("txt", "json"), help="text from a.txt or a.json next to a.mp4")
        else:
            sub.add_argument("--split", metavar="NAME", help="a folder in FOLDER (train), or a list of files")
    return parser.parse_args(argv)


@exit_on_user_error
def main() -> None:
    """The command line."""
    run()


if __name__ == "__main__":
    main()
