"""A folder of videos and images as a table: their paths, and the captions that lie next to them.

The caption of `clip.mp4` is in `clip.txt`, `clip.caption` or `clip.json`, as trainers of LoRAs expect it, or in a table of the
folder that is called `captions` or `metadata`, as datasets and diffusers write it. A file's own caption wins over a table's.
"""

import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opensora.datasets.table.files import SHOWN_ROWS, Block, cell_texts, read_blocks
from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, refuse_unlisted
from opensora.utils.errors import UserError, first_few
from opensora.utils.folders import parse_json

logger = logging.getLogger(__name__)

SIDECARS = ("txt", "caption", "json")
TABLES = ("captions", "metadata")
TABLE_FORMATS = (".csv", ".jsonl", ".json", ".parquet")
PATH_COLUMNS = ("path", "file_name", "filename", "file", "video", "image")
TEXT_COLUMNS = ("caption", "text", "prompt", "captions")
SHOWN_REASONS = 6


class Found(NamedTuple):
    """Files of a folder, sorted, and how many others there are, by reason."""

    files: list[Path]
    left_out: Counter[str]


def find_files(folder: Path, extensions: Sequence[str]) -> Found:
    """All files below a folder with one of the extensions (in any case), in the order of their paths.

    Links to folders are followed, each folder once. Hidden files and folders, and names that are not UTF-8, are left out.

    Raises:
        UserError: there is no such file.
    """
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for path in _walk(folder, left_out):
        suffix = path.suffix.lower()
        if suffix not in extensions:
            left_out[f"{suffix or 'files without extension'} files"] += 1
        elif any("\ud800" <= character <= "\udfff" for character in str(path)):  # Python's stand-ins for other bytes
            left_out["files whose names are not UTF-8"] += 1
        else:
            files.append(path)
    if not files:
        found = "; ".join(f"{count} {reason}" for reason, count in (+left_out).most_common(SHOWN_REASONS))
        raise UserError(f"{folder} has no file with one of {' '.join(extensions)}; it has: {found or 'nothing'}.")
    return Found(sorted(files), left_out)


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse_unlisted, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        left_out["hidden folders"] += sum(name.startswith(".") for name in folders)
        left_out["hidden files"] += sum(name.startswith(".") for name in names)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def folder_block(folder: Path, *, with_captions: bool) -> Block:
    """The rows of a folder, as `read_blocks` gives those of a table: `path`, and `text` where captions are wanted.

    Files without a caption are left out then, and named in the log.

    Raises:
        UserError: no file is left, or a caption cannot be read.
    """
    files, _ = find_files(folder, (*VIDEO_EXTENSIONS, *IMAGE_EXTENSIONS))
    names = [path.relative_to(folder).as_posix() for path in files]
    if not with_captions:
        return len(names), {"path": names}
    captions = read_captions(folder, files)
    missing = [name for name, caption in zip(names, captions, strict=True) if not caption]
    if len(missing) == len(names):
        raise UserError(
            f"{folder}: none of its {len(names)} videos and images has a caption. Write each into a text file of the same name "
            "(clip.txt for clip.mp4), or all into captions.csv with the columns path and text."
        )
    if missing:
        shown = ", ".join(first_few(missing, SHOWN_ROWS))
        logger.warning(
            "%s: %d of %d files have no caption and are left out: %s.", folder, len(missing), len(names), shown
        )
    kept = [i for i, caption in enumerate(captions) if caption]
    return len(kept), {"path": [names[i] for i in kept], "text": [captions[i] for i in kept]}


def read_captions(folder: Path, files: Sequence[Path]) -> list[str]:
    """The caption of each of the files of a folder, "" where there is none.

    Raises:
        UserError: a file with captions cannot be read, or has no column of file names or captions.
    """
    # names of one file may be written in two ways: "./a.mp4", and an umlaut as one character or as two
    listed: dict[str, tuple[str, str]] = {}  # -> table, caption
    for table in sorted(folder.iterdir()):
        if table.stem.lower() in TABLES and table.suffix.lower() in TABLE_FORMATS:
            for name, caption in _rows(table):
                listed.setdefault(_key(folder / name), (table.name, caption))
    captions, used = [], set()
    for path in files:
        keys = [key for key in (_key(path), _key(path.with_suffix(""))) if key in listed]
        used.update(keys)
        own = next((text for kind in SIDECARS if (text := sidecar_caption(path, kind))), "")
        captions.append(own or next((listed[key][1] for key in keys), ""))
    if absent := [Path(key).name for key in listed if key not in used]:
        tables = ", ".join(sorted({listed[key][0] for key in listed if key not in used}))
        shown = ", ".join(first_few(absent, SHOWN_ROWS))
        logger.warning("%s: %s names %d files that are not there: %s.", folder, tables, len(absent), shown)
    return captions


def sidecar_caption(path: Path, kind: str) -> str | None:
    """The caption next to a video or image: all of `clip.txt` or `clip.caption`, or `caption`, `text` or `prompt` of `clip.json`.

    Returns:
        It without blanks around it; None where there is no such file, or none in it.

    Raises:
        UserError: the file cannot be read.
    """
    source = path.with_suffix(f".{kind}")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read as UTF-8 text ({error}).") from error
    if kind != "json":
        return text.strip()
    value = _json(source, text)
    return _caption(value) if isinstance(value, dict) else None


def _rows(table: Path) -> Iterator[tuple[str, str]]:
    """File names and captions of a table. A `.json` is {name: caption}, {name: {"caption": ...}} or a list of objects."""
    blocks: Iterator[Block] = iter(())
    if table.suffix.lower() == ".json":
        value = _json(table, table.read_text(encoding="utf-8-sig"))
        if isinstance(value, dict):
            pairs = {name: _caption(item) if isinstance(item, dict) else item for name, item in value.items()}
            yield from ((name, text.strip()) for name, text in pairs.items() if isinstance(text, str))
            return
        records = value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else []
        names = dict.fromkeys(name for record in records for name in record)
        blocks = iter([(len(records), {name: [record.get(name) for record in records] for name in names})])
    else:
        blocks = read_blocks(table)
    for _, block in blocks:
        chosen = [next((name for name in known if name in block), None) for known in (PATH_COLUMNS, TEXT_COLUMNS)]
        if None in chosen:
            raise UserError(
                f"{table} has no column of file names ({', '.join(PATH_COLUMNS)}) or none of captions ({', '.join(TEXT_COLUMNS)}); "
                f"its columns are: {', '.join(block) or 'none'}. Rename one, or move the file away."
            )
        columns = [cell_texts(block[name]) for name in chosen if name is not None]
        yield from ((name, text.strip()) for name, text in zip(*columns, strict=True) if name)


def _caption(record: dict[str, Any]) -> str | None:
    return next((record[key].strip() for key in TEXT_COLUMNS if isinstance(record.get(key), str)), None)


def _json(source: Path, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{source} is no valid JSON ({error}).") from error


def _key(path: Path) -> str:
    return unicodedata.normalize("NFC", os.path.normpath(path.absolute()))
