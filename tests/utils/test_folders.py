"""JSON that is nested so deeply that Python's recursion limit ends its reading, or a later step: one clear error, wherever it is."""

import json
from pathlib import Path

import pytest

from opensora.datasets.cache.records import read_metadata
from opensora.datasets.table.files import read_frame
from opensora.datasets.table.table import read_table
from opensora.inference.manifest import finished, read_sidecar
from opensora.inference.prompts import split_settings
from opensora.utils.errors import UserError
from opensora.utils.folders import MAX_NESTING, parse_json, read_json
from tools.datasets.datautil.text import _sidecar


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_a_limit_of_nesting(opening, closing):
    text = nested(MAX_NESTING, opening, closing)
    assert json.dumps(parse_json(text)) == text
    for depth in (MAX_NESTING + 1, 100_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_json(nested(depth, opening, closing))


def test_wide_is_not_deep():
    for wide in ([{"a": [1]}] * 1000, [json.loads(nested(MAX_NESTING - 1))] * 2):
        assert parse_json(json.dumps(wide)) == wide


# 101 is refused by our limit, 100,000 by Python's
@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 100_000])
@pytest.mark.parametrize(("name", "text", "read", "message"), [
    ("a.json", "{}", lambda path: read_json(path, "Mend it."), r"a\.json is no valid JSON \(.* nested more than 100 deep\). Mend it"),
    ("a.jsonl", '{"path": "a.mp4", "text": "", "x": {}}', read_table, r"a\.jsonl, line 1: no valid JSON \(.* nested more than 100"),
    ("a.jsonl", '{"path": "a.mp4", "text": {}}', read_frame, r"a\.jsonl, line 1: no valid JSON \(.* nested more than 100"),
    ("a.json", '{"config": {}}', read_sidecar, r"a\.json is no sidecar of a sample"),
    ("METADATA", '{"format": {}}', lambda path: read_metadata(path.parent, "Make it."), r"METADATA is no valid JSON \(.* nested more than 100"),
    ("a.json", '{"text": {}}', lambda path: _sidecar(path, "json"), r"a\.json is no valid JSON \(.* nested more than 100"),
])  # fmt: skip
def test_files_nested_too_deeply(tmp_path, depth, name, text, read, message):
    path = tmp_path / name
    path.write_text(text.replace("{}", nested(depth)))
    with pytest.raises(UserError, match=message):
        read(path)


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 100_000])
def test_settings_of_a_prompt_nested_too_deeply(depth):
    prompt = f'a lake {{"reference_path": {nested(depth)}}}'
    with pytest.raises(UserError, match=r"row 1: the settings at its end are no valid JSON \(.* nested more than 100"):
        split_settings(prompt, "row 1")


def test_the_gallery_passes_over_a_sidecar_nested_too_deeply(tmp_path: Path):
    (tmp_path / "a.mp4").write_bytes(b"video")
    (tmp_path / "a.json").write_text(nested(100_000))
    assert list(finished(tmp_path)) == []
