"""Prose of README, docs, configs, help texts and messages has the field's words, one for each thing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    r"told": "conditioning timestep, metadata, reported",
    r"pictures?": "image",
    r"films?": "video",
    r"pieces?": "chunk, part",
    r"(?<!contact )(?<!data )(?<![/-])sheets?(?!\.)": "image grid, contact sheet",
    r"wish(?:es)?": "loss, request",
    r"beside": "next to, compared with",
    r"computed again": "recomputed, activation checkpointing",
    r"is no number(?! of)": "is NaN, is not finite",
    r"number formats?": "dtype",
    r"averaged? weights": "EMA weights",
    r"frames that move": "denoised frames",
    r"given frames": "conditioning frames",
    r"place of (?:a|the) sample": "sample index",
}
WRONG = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
EXCEPTIONS = {
    "assets/clips/ATTRIBUTION.md": "a film is what it is",
    "assets/tokenizers/t5/README.md": "SentencePiece's own word",
    "tools/caption": "what a model is asked for",
}


def prose(path: Path) -> str:
    """The words of a page without its code, or the docstrings and messages of a module."""
    text = path.read_text(encoding="utf-8")
    if not WRONG.search(text):  # most files, and much faster
        return ""
    if path.suffix == ".py":
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        text = "\n\n".join(string for string in strings if isinstance(string, str) and " " in string)
        text = re.sub(r"^ {4,}(?:python|torchrun) .*$|^\w+: ", "", text, flags=re.MULTILINE)  # commands; arguments
        text = re.sub(r"^ +\w+(?:, \w+)*: ", "", text, flags=re.MULTILINE)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\w+\.\w+=\S+", "", text)


@pytest.mark.parametrize("folder", ["docs", "opensora", "tools", "scripts", "configs", "experiments", "assets", "."])
def test_words(folder):
    pages = ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*")
    found = []
    for path in sorted(page for page in pages if page.suffix in (".md", ".py") and page.name != "CHANGELOG.md"):
        name = str(path.relative_to(ROOT))
        if not name.startswith(tuple(EXCEPTIONS)):
            found += [f"{name}: {hit[0]!r}" for hit in WRONG.finditer(prose(path))]
    assert found == [], f"say instead {WORDS}"
