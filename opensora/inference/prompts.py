"""Prompts: where they are read from, and what is written inside them.

    a calm lake{"reference_path": "lake.png", "mask_strategy": "0"}     settings of this prompt, as JSON (Open-Sora 1.1)
    |0|a calm lake|2|a storm over the lake                              the text changes from loop 2 on
    a calm lake aesthetic score: 6.5. motion score: 5.0.                as captions were written in training (Open-Sora 1.2)

Everything else is text: brackets, braces and bars included. Braces are settings only at the end of the prompt, and when a key in
them is a setting's name, or nearly; such braces before other text are text, with a warning.

A prompt's index is its position in the complete list, before `start_index` and `end_index` select a part of it: a run over a part
of a file makes the same videos as a run over all of it.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from opensora.config.load import InferenceConfig
from opensora.datasets.table.files import read_blocks
from opensora.inference.mask_strategy import check_references, parse_mask_strategy
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError, first_few
from opensora.utils.folders import parse_json, shipped

logger = logging.getLogger(__name__)

SCORE_PHRASES = {"aes": "aesthetic score:", "flow": "motion score:", "camera_motion": "camera motion:"}
SEGMENT = re.compile(r"\|([0-9]{1,9})\|")
SCORE = re.compile(r"\b(?:(?:aesthetic score|motion score): -?\d+(?:\.\d+)?\.\s*|camera motion: [^.:|]+\.\s*)")
# from a brace to the brace that closes it; or to the next one or the end of the text, where none does
BRACES = re.compile(r"""\{\s*(?=["'])(?:[^{}"]|"(?:[^"\\]|\\.)*(?:"|\Z))*(?:(\})\s*|(?=\{)|\Z)""", re.DOTALL)
LISTS = 'a .json file of prompts is a list: ["a lake", ...] or [{"text": "a lake", "seed": 1}, ...].'
KEY = re.compile(r"""["']([^"'{}]*)["']\s*:""")


class Segment(NamedTuple):
    """The text of a long video from one of its loops on."""

    loop: int
    text: str


@dataclass(frozen=True, kw_only=True)
class PromptItem:
    """One prompt.

    Attributes:
        index: its position in the complete list.
        segments: the texts, at least one; the first is of loop 0.
        references: files or URLs, which conditions count from 0.
        mask_strategy: as written; see `opensora.inference.mask_strategy`. None = not set.
        negative_prompt: what to steer away from, "" = the encoder's "no text"; None = the model's own.
        overrides: settings of this prompt alone: `seed` (int), `cfg_scale` (float).
    """

    index: int
    segments: tuple[Segment, ...]
    references: tuple[str, ...] = ()
    mask_strategy: str | None = None
    negative_prompt: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in (*(segment.text for segment in self.segments), self.negative_prompt or "", *self.references):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"prompt {self.index}: {text[:80]!a} is no Unicode text: {error.object[error.start]!a} is half of a surrogate pair, or "
                    "a byte of another encoding. Give it as UTF-8; in a shell set LANG=C.UTF-8."
                ) from error

    @property
    def text(self) -> str:
        """The text of the first loop."""
        return self.segments[0].text

    def text_at(self, loop: int) -> str:
        """The text of a loop: that of the last segment that has begun."""
        return [segment.text for segment in self.segments if segment.loop <= loop][-1]


class _Row(NamedTuple):
    """A prompt as it is written."""

    number: int  # index in the complete list
    text: str
    settings: Mapping[str, Any]  # cells of a table
    where: str  # for messages


def load_items(cfg: InferenceConfig) -> list[PromptItem]:
    """The prompts that a config asks for, `[start_index:end_index]` of the complete list, with their settings.

    A prompt's own settings, in JSON at its end or in a table's cells, win over the config's: `reference_path` and `mask_strategy`,
    one for each prompt; `negative_prompt`, one for each or one for all; `aes`, `flow`, `camera_motion`, which every text gets that
    does not have them. `loop` limits the loops of texts and conditions.

    Raises:
        UserError: no prompt is left, a file cannot be read, or prompts are malformed; the message lists them.
    """
    rows = _rows(cfg.prompt, cfg.prompt_path, cfg.start_index, cfg.end_index)
    scores = check_settings({name: getattr(cfg, name) for name in SCORE_PHRASES}, "config")
    of_config: list[dict[str, Any]] = [dict(scores) for _ in rows]
    for name in ("reference_path", "mask_strategy", "negative_prompt"):
        values = getattr(cfg, name)
        if values is None:
            continue
        if name == "negative_prompt" and len(values) == 1:
            values = values * len(rows)
        if len(values) != len(rows):
            raise UserError(
                f"{name} has {len(values)} entries for {len(rows)} prompts; give one for each, '' where a prompt has none."
            )
        # in a list with other texts '' is a prompt that has none; alone it can only be meant
        empty_is_meant = name == "negative_prompt" and not any(value.strip() for value in values)
        for settings, value in zip(of_config, values, strict=True):
            if value.strip() or empty_is_meant:
                settings[name] = files_of(value) if name == "reference_path" else value
    items, problems = [], []
    for row, settings in zip(rows, of_config, strict=True):
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
    """The prompts of a run as they are written, `[start_index:end_index]` of the complete list; see `load_items`.

    Args:
        prompt: the prompts themselves; wins over `prompt_path`.
        prompt_path: a UTF-8 file. `.csv`, `.jsonl`, and `.json` with a list of objects: the column `text`, or `prompt` in rows
            without it, taken verbatim, empty cells too; `.json` with a list of texts: each. Any other name: one prompt a line,
            stripped; blank lines and lines that start with `#` are no prompts.
        start_index, end_index: the part of the list to use; None = from its start, to its end.

    Raises:
        UserError: no prompt is left, or the file cannot be read.
    """
    return [row.text for row in _rows(prompt, prompt_path, start_index, end_index)]


def as_items(
    prompts: Sequence[str | PromptItem],
    indices: Sequence[int] | None = None,
    negative_prompts: Sequence[str | None] | str | None = None,
) -> list[PromptItem]:
    """Prompts from Python: strings get an index (0, 1, ... by default) and, if given, a negative prompt each, or one for all."""
    are_prompts = not isinstance(prompts, str) and all(isinstance(prompt, str | PromptItem) for prompt in prompts)
    if not are_prompts or not prompts or (indices is not None and len(indices) != len(prompts)):
        raise ValueError(f"expected a list of prompts, one index for each; got {prompts!r}, {indices!r}.")
    negatives = (
        [negative_prompts] * len(prompts) if isinstance(negative_prompts, str | None) else list(negative_prompts)
    )
    if len(negatives) != len(prompts):
        raise ValueError(f"{len(negatives)} negative prompts for {len(prompts)} prompts.")
    items = []
    for i, (prompt, negative) in enumerate(zip(prompts, negatives, strict=True)):
        if not isinstance(prompt, PromptItem):
            index = i if indices is None else int(indices[i])
            prompt = PromptItem(index=index, segments=(Segment(0, prompt),), negative_prompt=negative)
        elif indices is not None or negative is not None:
            raise ValueError("a PromptItem has its own index and negative prompt; give those of strings only.")
        items.append(prompt)
    return items


def _item(row: _Row, of_config: Mapping[str, Any], cfg: InferenceConfig) -> PromptItem:
    """One row with its settings: the config's, the table's, and those at the end of the text."""
    where = row.where
    text, inline = split_settings(row.text, where)
    cells = check_settings(row.settings, where)
    if twice := sorted(cells.keys() & inline.keys()):
        raise UserError(f"{where}: {twice[0]} is set in the table and at the end of the text; keep one.")
    settings = {**of_config, **cells, **inline}
    segments = split_segments(text, where)
    item = PromptItem(
        index=row.number,
        segments=tuple(Segment(loop, with_scores(words, settings)) for loop, words in segments),
        references=settings.get("reference_path", ()),
        mask_strategy=settings.get("mask_strategy"),
        negative_prompt=settings.get("negative_prompt"),
        overrides={name: settings[name] for name in ("seed", "cfg_scale") if name in settings},
    )
    conditions = parse_mask_strategy(item.mask_strategy, cfg.mask_strategy_format, f"{where}: mask_strategy")
    loops = [(f"segment |{segment.loop}|", segment.loop) for segment in segments]
    loops += [(f"mask_strategy={item.mask_strategy!r}", condition.loop) for condition in conditions]
    for what, loop in loops:
        if loop >= cfg.loop:
            raise UserError(
                f"{where}: {what} has no effect, for loop={cfg.loop} makes loops 0 to {cfg.loop - 1}; set --loop {loop + 1}."
            )
    if conditions and not item.references:
        raise UserError(f"{where}: mask_strategy={item.mask_strategy!r} has no effect without reference_path.")
    check_references(conditions, len(item.references), f"{where}: mask_strategy")
    return item


def _rows(
    prompt: str | Sequence[str] | None, prompt_path: str | Path | None, start: int | None, end: int | None
) -> list[_Row]:
    """The chosen part of the list."""
    if prompt is not None:
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        rows, source = [_Row(i, text, {}, f"prompt {i}") for i, text in enumerate(texts)], "prompt"
    elif prompt_path is None:
        raise UserError('nothing to sample: give --prompt "a calm lake at dawn" or --prompt-path FILE.')
    else:
        path, source = Path(prompt_path), str(prompt_path)
        if not path.is_file():
            raise UserError(f"prompt_path={path}: there is no such {'regular ' if path.exists() else ''}file.")
        rows = _read_table(path) if path.suffix.lower() in (".csv", ".jsonl", ".json") else _read_lines(path)
    if not rows:
        raise UserError(f"{source}: there is no prompt in it.")
    if (start or 0) < 0 or (end or 0) < 0:
        raise UserError(f"start_index={start}, end_index={end}: give positions counted from 0, or leave them out.")
    chosen = rows[start:end]
    if not chosen:
        raise UserError(
            f"start_index={start or 0}, end_index={end} leave no prompt: {source} has {len(rows)}, "
            f"numbered 0 to {len(rows) - 1}."
        )
    return chosen


def _read_lines(path: Path) -> list[_Row]:
    try:
        # utf-8-sig: spreadsheets put a byte-order mark in front, which is no part of the first prompt
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_path={path} is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    return [_Row(i, line, {}, f"{path}, line {number}") for i, (number, line) in enumerate(lines)]


def _read_table(path: Path) -> list[_Row]:
    """One prompt a row: its column `text` (or `prompt`), and columns named after settings; see `load_prompts`."""
    records: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    if path.suffix.lower() == ".json":
        records = _read_json(path)
        names = dict.fromkeys(name for record in records for name in record)
    else:
        for size, block in read_blocks(path):
            names |= dict.fromkeys(block)
            if size:
                records += [dict(zip(block, cells, strict=True)) for cells in zip(*block.values(), strict=True)]
    wanted = ["text", "prompt"] if any(record.get("text") is None for record in records) else ["text"]
    if names and not names.keys() & {"text", "prompt"}:
        raise UserError(f"prompt_path={path}: no column 'text'; its columns are {', '.join(names) or '(none)'}.")
    for name in [name for name in names if name not in (*wanted, *SETTINGS)]:
        hint = did_you_mean(name, list(SETTINGS))
        level = logging.WARNING if hint else logging.INFO
        logger.log(level, "prompt_path=%s: the column %r is not used.%s", path, name, hint)
    rows = []
    for i, record in enumerate(records):
        text = next((record[name] for name in wanted if record.get(name) is not None), "")
        where = f"{path}, row {i + 1}"
        if isinstance(text, bool) or not isinstance(text, str | int):
            raise UserError(f"{where}: text={text!r}; expected a text or a class number.")
        cells = {name: record.get(name) for name in SETTINGS if name in names}
        if path.suffix.lower() == ".csv" and not (cells.get("negative_prompt") or "").strip():
            cells["negative_prompt"] = None  # an empty cell; in JSON "" is a text
        rows.append(_Row(i, str(text), cells, where))
    return rows


def _read_json(path: Path) -> list[dict[str, Any]]:
    """A list of texts, or of objects such as the lines of a JSONL file."""
    try:
        content = parse_json(path.read_text(encoding="utf-8-sig"))
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise UserError(f"prompt_path={path}: no valid JSON ({error}); {LISTS}") from error
    if not isinstance(content, list) or not all(isinstance(item, str | dict) for item in content):
        raise UserError(f"prompt_path={path}: {LISTS}")
    return [{"text": item} if isinstance(item, str) else item for item in content]


def split_settings(prompt: str, where: str) -> tuple[str, dict[str, Any]]:
    """The prompt without the JSON at its end, and the checked settings in it; the prompt as it is where there are none.

    Raises:
        UserError: the JSON is broken, or a setting is unknown, repeated or of the wrong kind.
    """
    names = [*SETTINGS]
    is_setting = cache(lambda name: name in names or bool(did_you_mean(name, names)))
    last = prompt.rfind("}")
    ends_in_text, warned = bool(prompt[last + 1 :].strip()), False
    for match in BRACES.finditer(prompt):
        if not any(map(is_setting, KEY.findall(match[0]))):
            continue
        follows = prompt[match.end() : match.end() + 1]
        if (ends_in_text and match.start() < last) or (match[1] and follows not in ("", "{", "}")):
            if not warned:
                logger.warning("%s: %.80s is text; settings stand at the end.", where, match[0].strip())
            warned = True
            continue
        try:
            found = parse_json(prompt[match.start() :])
        except ValueError as error:
            raise UserError(
                f"{where}: the settings at its end are no valid JSON ({error}); write them as "
                '{"reference_path": "a.png", "mask_strategy": "0"}, after the text. Where they are text, let more text follow.'
            ) from error
        return prompt[: match.start()].rstrip(), check_settings(found, where)
    return prompt, {}


def split_segments(text: str, where: str) -> tuple[Segment, ...]:
    """The segments of `|0|a lake|2|a storm`; a text that does not begin with a number between bars is one segment.

    Raises:
        UserError: the numbers do not begin with 0 and ascend, or a segment has no text.
    """
    stripped = text.strip()
    if not SEGMENT.match(stripped):
        return (Segment(0, text),)
    _, *parts = SEGMENT.split(stripped)
    segments = tuple(Segment(int(loop), words.strip()) for loop, words in zip(parts[::2], parts[1::2], strict=True))
    loops = [segment.loop for segment in segments]
    if loops[0] != 0:
        raise UserError(f"{where}: its segments begin with |{loops[0]}|; the first is |0|.")
    if loops != sorted(set(loops)):
        raise UserError(f"{where}: its segments are numbered {loops}; numbers ascend, each once.")
    if empty := [segment.loop for segment in segments if not segment.text]:
        raise UserError(f"{where}: segment |{empty[0]}| has no text.")
    return segments


def with_scores(text: str, scores: Mapping[str, float | str | None]) -> str:
    """The text with the scores that are set and not in it already: numbers with one decimal, words as they are.

    `with_scores("a lake", {"aes": 6.5})` is "a lake aesthetic score: 6.5."
    """
    present = text.lower()
    for name, phrase in SCORE_PHRASES.items():
        value = scores.get(name)
        if value is not None and phrase not in present:
            text = f"{text} {phrase} {value if isinstance(value, str) else f'{value:.1f}'}."
    return text.lstrip() if not present else text


def without_scores(text: str) -> str:
    """The reverse of `with_scores`: the text without the scores at its end."""
    start = end = 0  # of the last row of scores
    for match in SCORE.finditer(text):
        start, end = start if match.start() == end else match.start(), match.end()
    return text[:start].rstrip() if end == len(text) else text


def check_settings(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of one prompt, each of its type; those that are None or an empty string are left out.

    A `negative_prompt` of "" stays: it is the encoder's "no text", which is not the model's own.

    Raises:
        UserError: a name is unknown, or a value is of the wrong kind.
    """
    checked = {}
    for name, value in values.items():
        if name not in SETTINGS:
            known = list(SETTINGS)
            raise UserError(
                f"{where}: {name!r} is no setting.{did_you_mean(name, known)} Settings: {', '.join(known)}."
            )
        is_blank = isinstance(value, str) and not value.strip()
        if value is None or (is_blank and name != "negative_prompt"):
            continue
        kind, expected = SETTINGS[name]
        result = kind(value)
        if result is None:
            raise UserError(f"{where}: {name}={value!r}; expected {expected}.")
        checked[name] = result
    return checked


def files_of(value: Any) -> tuple[str, ...] | None:
    """Files or URLs: joined by ";" in a string, or a list of them."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(";") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(file, str) and file.strip() for file in value):
        return None
    return tuple(map(shipped, value))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    """None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
        return int(value)
    return value if type(value) is int else None


def _score(value: Any) -> float | str | None:
    """A number, or a word such as "excellent"."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return (_text(value) or "").strip() or None
    return _number(value)


SETTINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reference_path": (files_of, "files or URLs, joined by ';' or as a list"),
    "mask_strategy": (
        lambda value: str(value) if type(value) is int else _text(value),
        "a string such as '0;0,1,0,-1,1'",
    ),
    "negative_prompt": (_text, "a text"),
    "seed": (_integer, "a whole number"),
    "cfg_scale": (_number, "a number"),
    "aes": (_score, "a number or a word"),
    "flow": (_score, "a number or a word"),
    "camera_motion": (_text, "words such as 'pan left'"),
}
