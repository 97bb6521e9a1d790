"""A folder of captioned clips as a table: captions where trainers and libraries write them, and what is left out."""

import json
import unicodedata
from pathlib import Path

import pytest

from opensora.datasets.table.table import read_table
from opensora.utils.errors import UserError


@pytest.fixture
def clips(tmp_path) -> Path:
    """Files that are looked at by name alone."""
    for name in ("a b.mp4", "sub/ü.webm", "c.gif", "d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def captions(folder: Path) -> dict[str, str]:
    table = read_table(folder)
    return {table.name(row): table.captions(row)[0] for row in range(len(table))}


def test_a_caption_is_next_to_its_file(clips, caplog):
    (clips / "a b.txt").write_text('a dog, "so it says",\nruns\n')
    (clips / "sub/ü.caption").write_text(" umlaut ")
    (clips / "c.json").write_text(json.dumps({"caption": "from json", "fps": 3}))
    (clips / "d.txt").write_text(" \n")
    (clips / "notes.txt").write_text("of no clip")
    (clips / ".hidden.mp4").write_bytes(b"x")
    expected = {"a b.mp4": 'a dog, "so it says",\nruns', "c.gif": "from json", "sub/ü.webm": "umlaut"}
    assert captions(clips) == expected
    assert "1 of 4 files have no caption and are left out: d.png." in caplog.text
    assert read_table(clips).path(0) == clips / "a b.mp4"
    assert len(read_table(clips, text_columns=())) == 4


NAMES = {"a b.mp4": "one", unicodedata.normalize("NFD", "./sub/ü.webm"): "two", "c.gif": " three, four"}
TABLES = {
    "metadata.csv": "file_name;text\n" + "".join(f"{name};{text}\n" for name, text in NAMES.items()),
    "metadata.jsonl": "".join(json.dumps({"file_name": name, "caption": text}) + "\n" for name, text in NAMES.items()),
    "captions.csv": "path,prompt\n" + "".join(f'{name},"{text}"\n' for name, text in NAMES.items()),
    "captions.json": json.dumps(NAMES),
    "Captions.json": json.dumps([{"video": name, "text": text} for name, text in NAMES.items()]),
    "metadata.json": json.dumps({name.rpartition(".")[0]: {"caption": text} for name, text in NAMES.items()}),
}


@pytest.mark.parametrize("name", TABLES)
def test_captions_are_in_a_table_of_the_folder(clips, name, caplog):
    (clips / name).write_text(TABLES[name])
    assert captions(clips) == {"a b.mp4": "one", "c.gif": "three, four", "sub/ü.webm": "two"}
    assert "not there" not in caplog.text


def test_own_captions_win_and_names_of_no_file_are_told(clips, caplog):
    (clips / "captions.json").write_text(json.dumps({"a b.mp4": "of the table", "c.gif": "c", "gone.mp4": "x"}))
    (clips / "a b.txt").write_text("own")
    assert captions(clips) == {"a b.mp4": "own", "c.gif": "c"}
    assert "captions.json names 1 files that are not there: gone.mp4" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "x.txt",
            "",
            r"none of its 4 videos and images has a caption. .*clip.txt for clip.mp4.* or all into captions.csv",
        ),
        ("c.json", "{", r"c.json is no valid JSON"),
        ("c.txt", "\xff", r"c.txt cannot be read as UTF-8 text"),
        ("captions.csv", "clip,words\n", r"captions.csv has no column of file names .*its columns are: clip, words"),
        (
            "metadata.jsonl",
            '{"file_name": "c.gif", "label": "c"}',
            r"none of captions \(caption, text.*: file_name, label",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(clips, name, text, words):
    (clips / name).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=words):
        read_table(clips)


def test_a_folder_is_no_table_of_what_it_does_not_have(clips, tmp_path):
    (clips / "c.txt").write_text("c")
    with pytest.raises(UserError, match=r"no column 'text_2'; its columns are: path, text"):
        read_table(clips, text_columns=("text", "text_2"))
    with pytest.raises(UserError, match=r"root=.* has no effect: .* is a folder"):
        read_table(clips, root=tmp_path)
