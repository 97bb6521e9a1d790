"""What a captioner is asked. A prompt may name columns of the table in braces: `Describe it; its title is {title}.`"""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opensora.utils.errors import UserError

TEMPLATES = {
    "video": (
        "These are frames of one video, in order of time. Describe the video in one paragraph of at most 80 words: the main "
        "subjects, what they do, the setting, the camera's movement and the style. Say only what can be seen; do not mention "
        "frames or that it is a video."
    ),
    "image": (
        "Describe this picture in one paragraph of at most 60 words: the main subjects, the setting, the light and the style. "
        "Say only what can be seen; do not mention that it is a picture."
    ),
    "short": "Describe what happens in these frames of one video in a single sentence of at most 20 words.",
    "refine": (
        "These are frames of one video, in order of time. A draft of its caption is: {text}\nCorrect what the frames contradict, "
        "add what is missing, and answer with the caption alone, at most 80 words."
    ),
}


def prompt_of(name: str) -> str:
    """The template of a name, the text of a file, or the text itself.

    Raises:
        UserError: it is empty, or its braces do not match.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    text = Path(name).read_text(encoding="utf-8").strip() if name.endswith(".txt") and Path(name).is_file() else name
    if not text.strip():
        raise UserError(f"--prompt is empty; name one of {', '.join(TEMPLATES)}, a .txt file, or write the prompt.")
    if " " not in text.strip():
        raise UserError(f"--prompt {text!r} is no template, file or sentence. Templates: {', '.join(TEMPLATES)}.")
    columns_in(text)
    return text


def columns_in(prompt: str) -> tuple[str, ...]:
    """The columns that a prompt names.

    Raises:
        UserError: braces do not match.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise UserError(f"--prompt: {error}; a brace that is text is written twice, {{{{ and }}}}.") from error
    if "" in names:
        raise UserError("--prompt: {} names no column; write {text}, or {{}} for braces.")
    return tuple(dict.fromkeys(names))


def filled(prompt: str, columns: Mapping[str, Sequence[Any]], row: int) -> str:
    """The prompt with a row's cells."""
    names = columns_in(prompt)
    return prompt.format_map({name: "" if columns[name][row] is None else columns[name][row] for name in names})
