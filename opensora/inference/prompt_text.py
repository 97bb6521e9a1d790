"""What is written inside a prompt: settings at its end, texts for the parts of a long video, scores.

    a calm lake{"reference_path": "lake.png", "mask_strategy": "0"}     settings of this prompt, as JSON (Open-Sora 1.1)
    |0|a calm lake|2|a storm over the lake                              the text changes from loop 2 on
    a calm lake aesthetic score: 6.5. motion score: 5.0.                as captions were written in training (Open-Sora 1.2)

Everything else is text: brackets, braces and bars included. Braces are settings only when they are the end of the prompt
and a key in them is a setting's name, or nearly.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Scores = Mapping[str, float | str | None]

SCORE_PHRASES = {"aes": "aesthetic score:", "flow": "motion score:", "camera_motion": "camera motion:"}
SEGMENT = re.compile(r"\|([0-9]{1,9})\|")
AT_THE_END = re.compile(
    r"(?:^|\s*\b)(?:(?:aesthetic score|motion score): -?\d+(?:\.\d+)?\.\s*|camera motion: [^.:|]+\.\s*)+$"
)
KEY = re.compile(r"""\{\s*["']([^"'{}]*)["']\s*:""")


class Segment(NamedTuple):
    """The text of a long video from one of its loops on."""

    loop: int
    text: str


def split_settings(prompt: str, where: str) -> tuple[str, dict[str, Any]]:
    """The prompt without the JSON at its end, and the checked settings in it; the prompt as it is where there are none.

    Raises:
        UserError: the JSON is broken, or a setting is unknown, repeated or of the wrong kind.
    """
    for match in KEY.finditer(prompt):
        found, error = _object(prompt[match.start() :])
        names = [match[1]] if found is None else list(found)
        if not any(_nearly_a_setting(name) for name in names):
            continue
        if found is None:
            raise UserError(
                f"{where}: the settings at its end are no valid JSON ({error}); write them as "
                '{"reference_path": "a.png", "mask_strategy": "0"}, after the text.'
            )
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
    _, *pieces = SEGMENT.split(stripped)
    segments = tuple(Segment(int(loop), words.strip()) for loop, words in zip(pieces[::2], pieces[1::2], strict=True))
    loops = [segment.loop for segment in segments]
    if loops[0] != 0:
        raise UserError(f"{where}: its segments begin with |{loops[0]}|; the first is |0|.")
    if loops != sorted(set(loops)):
        raise UserError(f"{where}: its segments are numbered {loops}; numbers ascend, each once.")
    if empty := [segment.loop for segment in segments if not segment.text]:
        raise UserError(f"{where}: segment |{empty[0]}| has no text.")
    return segments


def with_scores(text: str, scores: Scores) -> str:
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
    return AT_THE_END.sub("", text)


def check_settings(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of one prompt, each of its type; those that are None or an empty string are left out.

    A `negative_prompt` of "" stays: it is the encoder's "no text", which is not the model's own.

    Raises:
        UserError: a name is unknown, or a value is of the wrong kind.
    """
    checked = {}
    for name, value in values.items():
        if name not in SETTINGS:
            raise UserError(f"{where}: {name!r} is no setting.{did_you_mean(name, list(SETTINGS))} {_known()}")
        if value is None or (isinstance(value, str) and not value.strip() and name != "negative_prompt"):
            continue
        kind, expected = SETTINGS[name]
        result = kind(value)
        if result is None:
            raise UserError(f"{where}: {name}={value!r}; expected {expected}.")
        checked[name] = result
    return checked


def files_of(value: Any) -> tuple[str, ...] | None:
    """Files or URLs: joined by ";" in a string, or a list of them."""
    if isinstance(value, list | tuple):
        return tuple(value) if all(isinstance(file, str) and file.strip() for file in value) else None
    return tuple(part.strip() for part in value.split(";") if part.strip()) if isinstance(value, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _strategy(value: Any) -> str | None:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def score_of(value: Any) -> float | str | None:
    """A number, or a word such as "excellent"."""
    number = _number(value)
    if number is not None:
        return number
    word = value.strip() if isinstance(value, str) else ""
    return word if word and _is_word(word) else None


def _is_word(text: str) -> bool:
    """Whether a text is no number: NaN and infinity are no scores."""
    try:
        float(text)
    except ValueError:
        return True
    return False


SETTINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reference_path": (files_of, "files or URLs, joined by ';' or as a list"),
    "mask_strategy": (_strategy, "a string such as '0;0,1,0,-1,1'"),
    "negative_prompt": (_text, "a text"),
    "seed": (_whole, "a whole number"),
    "cfg_scale": (_number, "a number"),
    "aes": (score_of, "a number or a word"),
    "flow": (score_of, "a number or a word"),
    "camera_motion": (_text, "words such as 'pan left'"),
}


def _known() -> str:
    return f"Settings: {', '.join(SETTINGS)}."


def _nearly_a_setting(name: str) -> bool:
    return name in SETTINGS or bool(did_you_mean(name, list(SETTINGS)))


def _object(text: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object that a text is, or None and why it is none."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    return value, ""


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{repeated!r} is there twice")
    return dict(pairs)
