"""Reading the prompts of a sampling run.

A prompt's index is its place in the complete list, before `start_index` and `end_index` cut it: a run over a part of
a file makes the same videos as a run over all of it.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from opensora.utils.errors import UserError


def load_prompts(
    prompt: str | Sequence[str] | None,
    prompt_path: str | Path | None,
    start_index: int | None = None,
    end_index: int | None = None,
) -> list[str]:
    """The prompts of a run, `[start_index:end_index]` of the complete list.

    Args:
        prompt: the prompts themselves, taken verbatim; wins over `prompt_path`.
        prompt_path: a UTF-8 file. `.csv`: its column `text`, taken verbatim, empty cells too. Any other name: one
            prompt a line, stripped; blank lines and lines that start with `#` are no prompts.
        start_index, end_index: the part of the list to use; None = from its start, to its end.

    Raises:
        UserError: no prompt is left, or the file cannot be read.
    """
    if prompt is not None:
        prompts, source = [prompt] if isinstance(prompt, str) else list(prompt), "prompt"
    elif prompt_path is not None:
        prompts, source = _read(Path(prompt_path)), str(prompt_path)
    else:
        raise UserError('nothing to sample: give --prompt "a calm lake at dawn" or --prompt-path FILE.')
    if not prompts:
        raise UserError(f"{source}: there is no prompt in it.")
    return _slice(prompts, start_index or 0, end_index, source)


def _slice(prompts: list[str], start: int, end: int | None, source: str) -> list[str]:
    if start < 0 or (end is not None and end < 0):
        raise UserError(f"start_index={start}, end_index={end}: give positions counted from 0, or leave them out.")
    chosen = prompts[start:end]
    if not chosen:
        raise UserError(
            f"start_index={start}, end_index={end} leave no prompt: {source} has {len(prompts)}, "
            f"numbered 0 to {len(prompts) - 1}."
        )
    return chosen


def _read(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"prompt_path={path}: there is no such file.")
    try:
        # utf-8-sig: spreadsheets put a byte-order mark in front, which is no part of the first prompt
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read_csv(file, path) if path.suffix.lower() == ".csv" else _read_lines(file)
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_path={path} is not UTF-8 text ({error}); save it as UTF-8.") from error


def _read_lines(lines: Iterable[str]) -> list[str]:
    stripped = (line.strip() for line in lines)
    return [line for line in stripped if line and not line.startswith("#")]


def _read_csv(lines: Iterable[str], path: Path) -> list[str]:
    reader = csv.DictReader(lines, strict=True)
    try:
        columns = reader.fieldnames or []
        if "text" not in columns:
            raise UserError(f"prompt_path={path}: no column 'text'; its columns are {', '.join(columns) or '(none)'}.")
        return [row["text"] or "" for row in reader]  # a short row has no cell there: None
    except csv.Error as error:
        raise UserError(f"prompt_path={path}, after line {reader.line_num}: {error}.") from error
