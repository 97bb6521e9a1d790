"""What a sampling run is asked for: prompts, each with all that belongs to it.

A prompt's index is its place in the complete list, before `start_index` and `end_index` cut it: a run over a part of
a file makes the same videos as a run over all of it.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from opensora.config.load import InferenceConfig
from opensora.datasets.table.files import read_frame
from opensora.inference.mask_strategy import check_references, parse_mask_strategy
from opensora.inference.prompt_text import (
    SCORE_PHRASES,
    SETTINGS,
    Segment,
    check_settings,
    files_of,
    split_segments,
    split_settings,
    with_scores,
)
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError, first_few

__all__ = ["PromptItem", "Segment", "load_items", "load_prompts"]

logger = logging.getLogger(__name__)

TABLES = (".csv", ".jsonl")
OVERRIDES = ("seed", "cfg_scale")


@dataclass(frozen=True, kw_only=True)
class PromptItem:
    """One prompt.

    Attributes:
        index: its place in the complete list.
        segments: the texts, at least one; the first is of loop 0.
        references: files or URLs, which conditions count from 0.
        mask_strategy: as written; see `opensora.inference.mask_strategy`. None = nothing was said.
        negative_prompt: what to steer away from, "" = the encoder's "no text"; None = the model's own.
        overrides: settings of this prompt alone: `seed` (int), `cfg_scale` (float).
    """

    index: int
    segments: tuple[Segment, ...]
    references: tuple[str, ...] = ()
    mask_strategy: str | None = None
    negative_prompt: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the first loop."""
        return self.segments[0].text

    def text_at(self, loop: int) -> str:
        """The text of a loop: that of the last segment that has begun."""
        return [segment.text for segment in self.segments if segment.loop <= loop][-1]


class Row(NamedTuple):
    """A prompt as it is written."""

    number: int  # its place in the complete list
    text: str
    settings: Mapping[str, Any]  # cells of a table
    where: str  # for messages


def load_items(cfg: InferenceConfig) -> list[PromptItem]:
    """The prompts that a config asks for, `[start_index:end_index]` of the complete list, with all that belongs to them.

    What a prompt says of itself, in JSON at its end or in a table's cells, wins over the config. Read of the config:
    `prompt` or `prompt_path`, `start_index`, `end_index`; `reference_path` and `mask_strategy`, one for each prompt;
    `negative_prompt`, one for each or one for all; `aes`, `flow`, `camera_motion`, which every text gets that does not
    have them; `loop`, the number of parts that texts and conditions may speak of.

    Raises:
        UserError: no prompt is left, a file cannot be read, or prompts are malformed; the message lists them.
    """
    rows = _rows(cfg.prompt, cfg.prompt_path, cfg.start_index, cfg.end_index)
    given = _from_config(cfg, len(rows))
    items, problems = [], []
    for row, settings in zip(rows, given, strict=True):
        try:
            items.append(_item(row, settings, cfg))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(first_few(problems)))
    return items


def load_prompts(
    prompt: str | Sequence[str] | None,
    prompt_path: str | Path | None,
    start_index: int | None = None,
    end_index: int | None = None,
) -> list[str]:
    """The prompts of a run as they are written, `[start_index:end_index]` of the complete list; `load_items` takes them apart.

    Args:
        prompt: the prompts themselves; wins over `prompt_path`.
        prompt_path: a UTF-8 file. `.csv` and `.jsonl`: its column `text`, taken verbatim, empty cells too. Any other name:
            one prompt a line, stripped; blank lines and lines that start with `#` are no prompts.
        start_index, end_index: the part of the list to use; None = from its start, to its end.

    Raises:
        UserError: no prompt is left, or the file cannot be read.
    """
    return [row.text for row in _rows(prompt, prompt_path, start_index, end_index)]


def _item(row: Row, given: Mapping[str, Any], cfg: InferenceConfig) -> PromptItem:
    """One row with its settings: the config's, the table's, and those at the end of the text."""
    text, inline = split_settings(row.text, row.where)
    cells = check_settings(row.settings, row.where)
    if twice := sorted(cells.keys() & inline.keys()):
        raise UserError(f"{row.where}: {twice[0]} is set in the table and at the end of the text; keep one.")
    settings = {**given, **cells, **inline}
    scores = {name: settings.get(name) for name in SCORE_PHRASES}
    segments = split_segments(text, row.where)
    item = PromptItem(
        index=row.number,
        segments=tuple(Segment(loop, with_scores(words, scores)) for loop, words in segments),
        references=settings.get("reference_path", ()),
        mask_strategy=settings.get("mask_strategy"),
        negative_prompt=settings.get("negative_prompt"),
        overrides={name: settings[name] for name in OVERRIDES if name in settings},
    )
    _check_conditions(item, cfg, row.where)
    return item


def _check_conditions(item: PromptItem, cfg: InferenceConfig, where: str) -> None:
    """See that nothing speaks of a loop that will not be made, that the strategy can be read, and fits the references."""
    conditions = parse_mask_strategy(item.mask_strategy, cfg.mask_strategy_format, f"{where}: mask_strategy")
    for what, loop in (
        *((f"segment |{segment.loop}|", segment.loop) for segment in item.segments),
        *((f"mask_strategy={item.mask_strategy!r}", condition.loop) for condition in conditions),
    ):
        if loop >= cfg.loop:
            raise UserError(
                f"{where}: {what} has no effect, for loop={cfg.loop} makes loops 0 to {cfg.loop - 1}; set --loop {loop + 1}."
            )
    if conditions and not item.references:
        raise UserError(f"{where}: mask_strategy={item.mask_strategy!r} has no effect without reference_path.")
    check_references(conditions, len(item.references), f"{where}: mask_strategy")


def _from_config(cfg: InferenceConfig, count: int) -> list[dict[str, Any]]:
    """What the config says for each of `count` prompts."""
    scores = check_settings({name: getattr(cfg, name) for name in SCORE_PHRASES}, "config")
    given: list[dict[str, Any]] = [dict(scores) for _ in range(count)]
    kinds: dict[str, Callable[[str], Any]] = {
        "reference_path": files_of,
        "mask_strategy": str,
        "negative_prompt": str,
    }
    for name, kind in kinds.items():
        values = getattr(cfg, name)
        if values is None:
            continue
        if name == "negative_prompt" and len(values) == 1:
            values = values * count
        if len(values) != count:
            raise UserError(
                f"{name} has {len(values)} entries for {count} prompts; give one for each, '' where a prompt has none."
            )
        # in a list with other texts '' is a prompt that has none; alone it can only be meant
        empty_is_meant = name == "negative_prompt" and not any(value.strip() for value in values)
        for settings, value in zip(given, values, strict=True):
            if value.strip() or empty_is_meant:
                settings[name] = kind(value)
    return given


def _rows(
    prompt: str | Sequence[str] | None, prompt_path: str | Path | None, start: int | None, end: int | None
) -> list[Row]:
    """The chosen part of the list."""
    if prompt is not None:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        rows, source = [Row(i, text, {}, f"prompt {i}") for i, text in enumerate(texts)], "prompt"
    elif prompt_path is not None:
        rows, source = _read(Path(prompt_path)), str(prompt_path)
    else:
        raise UserError('nothing to sample: give --prompt "a calm lake at dawn" or --prompt-path FILE.')
    if not rows:
        raise UserError(f"{source}: there is no prompt in it.")
    return _slice(rows, start or 0, end, source)


def _slice(rows: list[Row], start: int, end: int | None, source: str) -> list[Row]:
    if start < 0 or (end is not None and end < 0):
        raise UserError(f"start_index={start}, end_index={end}: give positions counted from 0, or leave them out.")
    chosen = rows[start:end]
    if not chosen:
        raise UserError(
            f"start_index={start}, end_index={end} leave no prompt: {source} has {len(rows)}, "
            f"numbered 0 to {len(rows) - 1}."
        )
    return chosen


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        raise UserError(f"prompt_path={path}: there is no such file.")
    if path.suffix.lower() in TABLES:
        return _read_table(path)
    try:
        # utf-8-sig: spreadsheets put a byte-order mark in front, which is no part of the first prompt
        with path.open(encoding="utf-8-sig") as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1)]
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_path={path} is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    return [Row(i, line, {}, f"{path}, line {number}") for i, (number, line) in enumerate(lines)]


def _read_table(path: Path) -> list[Row]:
    """One prompt a row: its column `text`, and columns named after settings."""
    frame = read_frame(path)
    names = list(frame.columns)
    if "text" not in names:
        raise UserError(f"prompt_path={path}: no column 'text'; its columns are {', '.join(names) or '(none)'}.")
    _tell_unused(path, [name for name in names if name not in ("text", *SETTINGS)])
    columns = {name: _values(frame[name]) for name in ("text", *SETTINGS) if name in names}
    texts = columns.pop("text")
    columns = {name: [None if _is_blank(value) else value for value in values] for name, values in columns.items()}
    if "negative_prompt" in columns and path.suffix.lower() == ".jsonl":
        columns["negative_prompt"] = _as_written(path, "negative_prompt")
    return [
        Row(i, _cell_text(text, where), {name: values[i] for name, values in columns.items()}, where)
        for i, text in enumerate(texts)
        for where in [f"{path}, row {i + 1}"]
    ]


def _values(column: pd.Series) -> list[Any]:
    """The cells of a column as Python's own values; None where there is none."""
    values = column.to_numpy(object).tolist()
    return [None if value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value for value in values]


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _as_written(path: Path, name: str) -> list[Any]:
    """A column of a JSONL file in which "" and nothing are two things, as they are not in a table."""
    with path.open(encoding="utf-8-sig") as file:
        return [json.loads(line).get(name) for line in file if line.strip()]


def _cell_text(value: Any, where: str) -> str:
    """A prompt, or in JSON also a class number."""
    if value is None:
        return ""
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise UserError(f"{where}: text={value!r}; expected a text or a class number.")


def _tell_unused(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if hint := did_you_mean(name, list(SETTINGS)):
            logger.warning("prompt_path=%s: the column %r is not used.%s", path, name, hint)
    if rest := [name for name in names if not did_you_mean(name, list(SETTINGS))]:
        logger.info("prompt_path=%s: columns that are not used: %s.", path, ", ".join(rest))
