"""Operations on captions."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.datasets.table.folder import sidecar_caption
from opensora.utils.errors import UserError
from tools.datasets.datautil.captions import URL, append, camera_words, clean, refine, with_scores
from tools.datasets.datautil.operations import Result, TableState, keep, operation
from tools.datasets.datautil.parallel import map_rows

GROUP = "captions"
TOKENIZERS = {"t5": "DeepFloyd/t5-v1_1-xxl"}
SHOWN_LANGUAGES = 5


@operation("remove-empty-caption", "noempty", group=GROUP)
def remove_empty_caption(table: TableState, _: Any) -> Result:
    """drop rows without a caption"""
    empty = (table.text("text").str.strip() == "").to_numpy(bool)
    return keep(table, ~empty, [("without a caption", empty)])


@operation("remove-url", "nourl", group=GROUP)
def remove_url(table: TableState, _: Any) -> Result:
    """drop rows whose caption holds a web address"""
    found = np.array([URL.search(text) is not None for text in table.text("text")], bool)
    return keep(table, ~found, [("with a web address in the caption", found)])


@operation("clean-caption", "clean", group=GROUP)
def clean_caption(table: TableState, _: Any) -> Result:
    """mend encodings, remove HTML, addresses, file names and #tags from captions; case stays"""
    return _replaced(table, map_rows(clean, _captions(table), workers=table.workers, label="cleaning"))


@operation("refine-llm-caption", "llm", group=GROUP)
def refine_llm_caption(table: TableState, _: Any) -> Result:
    """remove "The video shows" and the like, and a last sentence that was cut off"""
    return _replaced(table, map_rows(refine, _captions(table), workers=table.workers, label="refining"))


@operation("append-text", "appended", group=GROUP, metavar="TEXT")
def append_text(table: TableState, words: str) -> Result:
    """put TEXT behind each caption"""
    return _replaced(table, [append(text, words) for text in _captions(table)])


@operation("score-to-text", "scored", group=GROUP)
def score_to_text(table: TableState, _: Any) -> Result:
    """put the scores of the columns aes, flow and cmotion behind each caption"""
    if not {"aes", "flow", "cmotion"} & set(table.frame.columns):
        raise UserError("there is none of the columns aes, flow and cmotion.")
    columns: list[list[Any]] = []
    for name in ("aes", "flow"):
        numbers = table.numbers(name) if name in table.frame.columns else np.full(len(table), np.nan)
        columns.append([None if value != value else float(value) for value in numbers])
    motion = table.text("cmotion").tolist() if "cmotion" in table.frame.columns else [""] * len(table)
    return _replaced(table, [with_scores(*row) for row in zip(_captions(table), *columns, motion, strict=True)])


@operation("merge-cmotion", "cmotion", group=GROUP)
def merge_cmotion(table: TableState, _: Any) -> Result:
    """put the camera motion of the column cmotion behind each caption"""
    motions = table.text("cmotion").tolist()
    unknown = sum(not camera_words(motion) for motion in motions)
    rows = zip(_captions(table), motions, strict=True)
    result = _replaced(table, [with_scores(text, None, None, motion) for text, motion in rows])
    return Result(result.table, note=f"{result.note}; {unknown} rows without a known camera motion")


@operation("load-caption", "load", group=GROUP, choices=("txt", "json"))
def load_caption(table: TableState, kind: str) -> Result:
    """take captions from the files next to the videos: a.txt, or "caption" or "text" of a.json, for a.mp4"""
    read = partial(_sidecar, kind=kind)
    files = [file if name else None for file, name in zip(table.files(), table.text("path"), strict=True)]
    found = map_rows(read, files, workers=table.workers, label="reading captions")
    old = table.text("text") if "text" in table.frame.columns else pd.Series([""] * len(table), dtype=object)
    new = [before if text is None else text for text, (_, before) in zip(found, old.items(), strict=True)]
    missing = sum(text is None for text in found)
    note = f"{len(found) - missing} captions read"
    if missing:
        note += f"; {missing} rows have no such file, or none with a caption, and stay as they are"
    return Result(table.with_columns(text=pd.Series(new, dtype=object)), note=note)


def _sidecar(path: Path | None, kind: str) -> str | None:
    return None if path is None else sidecar_caption(path, kind)


@operation("count-num-token", "ntoken", group=GROUP, metavar="TOKENIZER")
def count_num_token(table: TableState, name: str) -> Result:
    """add text_len, the tokens of each caption; TOKENIZER is t5, a folder or a hub id"""
    from transformers import AutoTokenizer

    name, captions = TOKENIZERS.get(name, name), _captions(table)
    source = resolve_pretrained(name, what="tokenizer")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise hub_error(name, "tokenizer", error) from error
    lengths: list[int] = []
    for start in range(0, len(captions), 1024):
        batch = captions[start : start + 1024]
        lengths += map(len, tokenizer(batch, add_special_tokens=True, truncation=False, verbose=False)["input_ids"])
    longest = f", at most {max(lengths)}" if lengths else ""
    return Result(table.with_columns(text_len=np.array(lengths, np.int64)), note=f"{sum(lengths)} tokens{longest}")


@operation("lang", "lang_{}", group=GROUP, metavar="CODE")
def lang(table: TableState, code: str) -> Result:
    """keep rows whose caption is in this language (en, zh, ...); needs py3langid"""
    try:
        from py3langid import rank
    except ImportError as error:
        raise UserError("--lang needs a small package: pip install py3langid") from error
    known = {name for name, _ in rank(code)}
    if code not in known:
        raise UserError(f"{code!r} is no language that is known; known are: {', '.join(sorted(known))}.")
    found = np.array(map_rows(_language, _captions(table), workers=table.workers, label="languages"), dtype=object)
    kept = found == code
    others = Counter(found[~kept]).most_common(SHOWN_LANGUAGES)
    reasons = [(f"in {name}" if name else "without letters", found == name) for name, _ in others]
    return keep(table, kept, [*reasons, ("in another language", ~kept)])


def _language(text: str) -> str:
    from py3langid import classify

    return str(classify(text)[0]) if any(character.isalpha() for character in text) else ""


def _captions(table: TableState) -> list[str]:
    return table.text("text").tolist()


def _replaced(table: TableState, captions: list[str]) -> Result:
    pairs = list(zip(_captions(table), captions, strict=True))
    changed = sum(old != new for old, new in pairs)
    emptied = sum(bool(old.strip()) and not new.strip() for old, new in pairs)
    note = f"{changed} captions changed" + (f", {emptied} of them became empty" if emptied else "")
    return Result(table.with_columns(text=pd.Series(captions, dtype=object)), note=note)
