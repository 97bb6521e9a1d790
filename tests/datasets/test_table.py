"""Tables: captions to the letter, paths that resolve, and mistakes that are named with their rows."""

from pathlib import Path

import pandas as pd
import pytest

from opensora.datasets.table import UNKNOWN, read_table
from opensora.utils.errors import UserError

CAPTIONS = [
    "",
    "NA",
    "None",
    "nan",
    "null",
    "a, b",
    'say "hi"',
    "two\nlines",
    "  kept  ",
    "007",
    "1.50",
    "émoji 🎬",
    "'",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(20):
        (tmp_path / f"{i}.mp4").write_bytes(b"x")
    return tmp_path


def write(folder: Path, text: str, name: str = "clips.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_captions_are_verbatim(folder, encoding, newline):
    quoted = [f'{i}.mp4,"{caption.replace(chr(34), chr(34) * 2)}"' for i, caption in enumerate(CAPTIONS)]
    table = read_table(write(folder, newline.join(["path,text", *quoted, ""]), encoding=encoding))
    assert [table.captions(row) for row in range(len(table))] == [[caption] for caption in CAPTIONS]
    assert table.path(3) == folder / "3.mp4"
    assert (table.num_frames == UNKNOWN).all()


def test_parquet_equals_csv(folder):
    pytest.importorskip("pyarrow")
    rows = {"path": [f"{i}.mp4" for i in range(len(CAPTIONS))], "text": CAPTIONS, "num_frames": range(1, 14)}
    frame = pd.DataFrame(rows)
    frame.to_parquet(folder / "clips.parquet")
    frame.to_csv(folder / "clips.csv", index=False)
    one, other = read_table(folder / "clips.csv"), read_table(folder / "clips.parquet")
    assert [one.captions(row) for row in range(len(one))] == [other.captions(row) for row in range(len(one))]
    assert one.num_frames.tolist() == other.num_frames.tolist() == list(range(1, 14))
    assert one.fingerprint() == other.fingerprint()
    frame["text"] = [None, *CAPTIONS[1:]]
    frame.to_parquet(folder / "clips.parquet")
    assert read_table(folder / "clips.parquet").captions(0) == [""]


def test_several_captions_skip_empty_ones(folder):
    path = write(folder, "path,text,short\n0.mp4,long,s\n1.mp4,,s\n2.mp4,,\n")
    table = read_table(path, text_columns=("text", "short"))
    assert [table.captions(row) for row in range(3)] == [["long", "s"], ["s"], [""]]
    assert read_table(path, text_columns=()).captions(0) == [""]


def test_paths_are_relative_to_root_or_to_the_table(folder, monkeypatch):
    (folder / "tables").mkdir()
    (folder / "elsewhere").mkdir()
    path = write(folder / "tables", "path,text\n0.mp4,a\n")
    monkeypatch.chdir(folder / "elsewhere")
    assert read_table(path, root=folder).path(0) == folder / "0.mp4"
    with pytest.raises(UserError, match=r"1 of 1 rows name a file that does not exist:\n  row 1: .*0.mp4"):
        read_table(path)
    absolute = write(folder / "tables", f"path,text\n{folder / '0.mp4'},a\n")
    assert read_table(absolute).path(0) == folder / "0.mp4"
    with pytest.raises(UserError, match=r"root: nowhere is no folder"):
        read_table(path, root="nowhere")


def test_num_frames_column(folder):
    table = read_table(write(folder, "path,text,num_frames\n0.mp4,a,12\n1.mp4,b,\n2.mp4,c,7.0\n"))
    assert table.num_frames.tolist() == [12, UNKNOWN, 7]
    for bad in ("0", "-3", "2.5", "many", "nan", "inf"):
        with pytest.raises(UserError, match=r"num_frames='.*' in row 2 is no number of frames \(rows 2\)"):
            read_table(write(folder, f"path,text,num_frames\n0.mp4,a,12\n1.mp4,b,{bad}\n"))


def test_fingerprint(folder):
    base = read_table(write(folder, "path,text\n0.mp4,a\n1.mp4,b\n")).fingerprint()
    assert base == read_table(write(folder, "path,text,extra\n0.mp4,a,1\n1.mp4,b,2\n", "other.csv")).fingerprint()
    for text in ("path,text\n0.mp4,a\n1.mp4,c\n", "path,text\n1.mp4,b\n0.mp4,a\n", "path,text\n0.mp4,a\n"):
        assert read_table(write(folder, text)).fingerprint() != base


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"clips.csv is empty; its first line is the header `path,text`"),
        ("path,text\n", r"clips.csv has a header but no rows"),
        ("Path,text\n0.mp4,a\n", r"no column 'path'; its columns are: Path, text"),
        ("pth,text\n0.mp4,a\n", r"no column 'path'.*Did you mean 'pth'"),
        ("path,texts\n0.mp4,a\n", r"no column 'text'.*Did you mean 'texts'\?.*dataset.text_columns"),
        ("0.mp4,a cat\n1.mp4,a dog\n", r"The first line looks like data: put the header `path,text` above it"),
        ("path,text,text\n0.mp4,a,b\n", r"more than one column 'text'"),
        ("path,text\n0.mp4,a, b\n1.mp4,b\n", r"2 columns, but row 1 has 3 cells \(rows 1\). Put a caption.*quotes"),
        ("path,text\n0.mp4,a\n1.mp4\n", r"2 columns, but row 2 has 1 cells"),
        ('path,text\n0.mp4,"open\n1.mp4,b\n', r"no valid CSV .*is a quote left open"),
        ("path,text\n0.txt,a\n", r"1 of 1 rows have no known extension:\n  row 1: .*0.txt\nKnown are .mp4"),
    ],
)
def test_malformed_tables(folder, text, message):
    with pytest.raises(UserError, match=message):
        read_table(write(folder, text))


def test_other_encodings_are_refused(folder):
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_table(write(folder, "path,text\n0.mp4,é\n", encoding="latin-1"))


def test_missing_files_are_counted_and_the_first_five_named(folder):
    rows = "".join(f"{i}.mp4,a\n" for i in range(13, 27))
    with pytest.raises(UserError) as caught:
        read_table(write(folder, f"path,text\n{rows}"))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("clips.csv: 7 of 14 rows name a file that does not exist:")
    assert [line.split(":")[0] for line in lines[1:6]] == [f"  row {i}" for i in range(8, 13)]
    assert lines[6] == "  and 2 more"
    assert f"relative to {folder}" in lines[7]
    assert "--root" in lines[7]


def test_extensions_are_known_in_any_case(folder):
    (folder / "0.mp4").rename(folder / "0.MP4")
    assert len(read_table(write(folder, "path,text\n0.MP4,a\n"))) == 1


def test_wrong_files_for_a_table(folder):
    write(folder, "path,text\n0.mp4,a\n")
    with pytest.raises(UserError, match=r"clip.csv does not exist. Did you mean 'clips.csv'"):
        read_table(folder / "clip.csv")
    with pytest.raises(UserError, match=r"clips.txt is neither a .csv nor a .parquet"):
        read_table(write(folder, "path,text\n0.mp4,a\n", "clips.txt"))
    pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match=r"clips.parquet is no readable parquet file"):
        read_table(write(folder, "path,text\n0.mp4,a\n", "clips.parquet"))


def test_large_tables_are_not_checked_file_by_file(folder, monkeypatch, caplog):
    monkeypatch.setattr("opensora.datasets.table.MAX_CHECKED_FILES", 1)
    with caplog.at_level("INFO"):
        assert len(read_table(write(folder, "path,text\nmissing.mp4,a\nmissing2.mp4,b\n"))) == 2
    assert "2 rows are too many" in caplog.text
