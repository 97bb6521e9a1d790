"""Tables: captions to the letter, paths that resolve, and mistakes that are named with their rows."""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from opensora.datasets.table.files import read_frame
from opensora.datasets.table.table import UNKNOWN, read_table
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


def test_fingerprints_are_those_that_checkpoints_hold(folder):
    """Written out as they were made when paths and captions were Python strings."""
    path = write(folder, "path,text,short,num_frames,flow\n0.mp4,émoji 🎬,s,12,1\n1.mp4,,,,\n2.mp4,c,d,3,0.5\n")
    digest = hashlib.blake2b(repr(("text", "short")).encode(), digest_size=16)
    for text in ("0.mp4", "1.mp4", "2.mp4", "émoji 🎬", "", "c", "s", "", "d"):
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    digest.update(np.array([12, 0, 3], np.int64).tobytes() + np.array([1, np.nan, 0.5]).tobytes())
    table = read_table(path, text_columns=("text", "short"))
    assert table.fingerprint() == digest.hexdigest() == "7397f0838bed0a10e8d43edb94b182f6"


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
        ("pth,text\n0.mp4,a\n", r"no column 'path'.*Rename 'pth' to 'path'"),
        ("name,file_name,text\na,0.mp4,b\n", r"no column 'path'.*Rename 'file_name' to 'path'"),
        ("path,texts\n0.mp4,a\n", r"no column 'text'.*seem to be in 'texts': --dataset.text_columns texts;"),
        ("path,tags,prompt\n0.mp4,a,b\n", r"no column 'text'.*seem to be in 'prompt': --dataset.text_columns prompt;"),
        (
            "path,a note\n0.mp4,b\n",
            r"no column 'text'.*Name the one .*--dataset.text_columns COLUMN; or '\(\)' to train",
        ),
        ("0.mp4,a cat\n1.mp4,a dog\n", r"The first line looks like data: put the header `path,text` above it"),
        ("path,text,text\n0.mp4,a,b\n", r"more than one column 'text'"),
        ("path,text\n0.mp4,a, b\n1.mp4,b\n", r"2 columns, but row 1 has 3 cells \(rows 1\). Put a caption.*quotes"),
        ("path,text\n0.mp4,a\n1.mp4\n", r"2 columns, but row 2 has 1 cells"),
        ('path,text\n0.mp4,"open\n1.mp4,b\n', r"no valid CSV .*is a quote left open"),
        ('path,text\n0.mp4,"a sign says "open" here"\n', r"no valid CSV .*not doubled inside quotes"),
        ('path,text\n"",a\n', r"1 of 1 rows have no known extension:\n  row 1: "),
        ("path,text\n0.txt,a\n", r"1 of 1 rows have no known extension:\n  row 1: .*0.txt\nKnown are .mp4"),
    ],
)
def test_malformed_tables(folder, text, message):
    with pytest.raises(UserError, match=message):
        read_table(write(folder, text))


@pytest.mark.parametrize("mark", [";", "\t"])
def test_semicolons_and_tabs_of_a_spreadsheet_are_read(folder, mark, caplog):
    caplog.set_level("INFO")
    table = read_table(write(folder, f'path{mark}text\n0.mp4{mark}"a{mark} b, c"\n1.mp4{mark}d, e\n'))
    assert [table.captions(row) for row in range(2)] == [[f"a{mark} b, c"], ["d, e"]]
    assert f"its columns are separated by {'semicolons' if mark == ';' else 'tabs'}" in caplog.text
    assert read_table(write(folder, f"path,text{mark}\n0.mp4,a\n"), text_columns=(f"text{mark}",)).captions(0) == ["a"]


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
    with pytest.raises(UserError, match=r"is a folder; a table .*tools.datasets.convert video .* --output"):
        read_frame(folder)
    with pytest.raises(UserError, match=r"clip.csv does not exist. Did you mean 'clips.csv'"):
        read_table(folder / "clip.csv")
    os.mkfifo(folder / "pipe.csv")  # to be opened it would wait for a writer
    with pytest.raises(UserError, match=r"pipe.csv is a pipe or a device, not a regular file"):
        read_table(folder / "pipe.csv")
    with pytest.raises(UserError, match=r"clips.txt: .txt is no table; known are"):
        read_table(write(folder, "path,text\n0.mp4,a\n", "clips.txt"))
    with pytest.raises(UserError, match=r"clips.parquet is no readable parquet file"):
        read_table(write(folder, "path,text\n0.mp4,a\n", "clips.parquet"))


def test_of_a_large_table_a_sample_of_the_files_is_looked_for(folder, monkeypatch, caplog):
    monkeypatch.setattr("opensora.datasets.table.table.MAX_CHECKED_FILES", 10)
    monkeypatch.setattr("opensora.datasets.table.table.SAMPLE_OF_FILES", 5)
    there = "".join(f"{i}.mp4,a\n" for i in range(20))
    with caplog.at_level("INFO"):
        assert len(read_table(write(folder, f"path,text\n{there}"))) == 20
    assert (
        "20 rows are too many to look for every file at start; of 5 that were looked for, 0 are missing" in caplog.text
    )
    missing = "".join(f"no{i}.mp4,a\n" for i in range(20))
    with pytest.raises(UserError, match=r"of 5 files that were looked for, 5 are not there. .*\n  row 1: .*no0.mp4"):
        read_table(write(folder, f"path,text\n{missing}"))


# ------------------------------------------------------------------------------------------------------- JSONL


def test_jsonl_equals_csv(folder):
    lines = [json.dumps({"path": f"{i}.mp4", "text": caption, "fps": 23.976}) for i, caption in enumerate(CAPTIONS)]
    lines[4] = json.dumps({"path": "4.mp4", "text": "null", "fps": None, "aes": 5.1}, ensure_ascii=False)
    other = CAPTIONS[5] + "\u2028" + CAPTIONS[11]  # a separator of lines for Python, not for JSON
    lines.append(json.dumps({"path": "19.mp4", "text": other}, ensure_ascii=False))
    lines.append(json.dumps({"path": "18.mp4"}))
    table = read_table(write(folder, "\n".join(["\ufeff" + lines[0], "", *lines[1:], ""]), "clips.jsonl"))
    assert [table.captions(row)[0] for row in range(len(table))] == [*CAPTIONS, other, ""]
    assert table.fps[0] == 23.976
    assert np.isnan(table.fps[[4, -1]]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"clips.jsonl is empty"),
        ('{"path": "0.mp4"}\n{"path": ', r"line 2: no valid JSON"),
        ('{"path": "0.mp4", "path": "1.mp4"}', r"line 1: no valid JSON \('path' is there twice\)"),
        ('["0.mp4", "a"]', r"line 1: not an object"),
        ('{"path": "0.mp4", "text": {"short": "a", "long": "b"}}', r"row 1: 'text' is not one value"),
        ('{"file": "0.mp4", "text": "a"}', r"no column 'path'; its columns are: file, text"),
        (
            '{"path": "0.mp4", "text": "\\ud83d\\udc3a"}\n\n{"path": "1.mp4", "text": "a wolf \\ud83d"}',
            r"clips.jsonl, line 3: 'text' has half of a character, '.ud83d', which is no text",
        ),
        ('{"path": "\\uDC3A.mp4", "text": "a"}', r"line 1: 'path' has half of a character"),
        ('{"path": "0.mp4", "\\udc3a": 1}', r"line 1: '.udc3a' has half of a character"),
        ('{"path": "0.mp4", "text": "a", "tags": [{"x": "\\ud83d"}]}', r"line 1: 'tags' has half of a character"),
    ],
)
def test_malformed_jsonl(folder, text, message):
    with pytest.raises(UserError, match=message):
        read_table(write(folder, text, "clips.jsonl"))


# ---------------------------------------------------------------------------------------- numbers and bad rows


def test_sizes_and_rates(folder):
    text = "path,text,height,width,fps,aspect_ratio\n0.mp4,a,240,426,29.97,0.56\n1.mp4,b,,,,\n"
    table = read_table(write(folder, text))
    assert table.height.tolist() == [240, UNKNOWN]
    assert table.width.tolist() == [426, UNKNOWN]
    assert table.fps[0] == 29.97
    assert np.isnan(table.fps[1])
    none = read_table(write(folder, "path,text\n0.mp4,a\n"))
    assert (none.height.tolist(), none.width.tolist(), np.isnan(none.fps).tolist()) == ([UNKNOWN], [UNKNOWN], [True])


@pytest.mark.parametrize("column", ["height", "width", "fps", "num_frames"])
@pytest.mark.parametrize("value", ["0", "-2", "nan", "inf", "wide"])
def test_rows_that_say_they_are_broken(folder, column, value, caplog):
    """Upstream puts a row without a height into a bucket of the largest resolution."""
    path = write(folder, f"path,text,{column}\n0.mp4,a,24\n1.mp4,b,{value}\n2.mp4,c,25\n")
    with pytest.raises(UserError, match=rf"{column}='{value}' in row 2 is no .* \(rows 2\); write a "):
        read_table(path)
    table = read_table(path, max_bad_share=0.5)
    assert [table.name(row) for row in range(len(table))] == ["0.mp4", "2.mp4"]
    assert [table.captions(row) for row in range(len(table))] == [["a"], ["c"]]
    assert getattr(table, column).tolist() == [24, 25]
    assert table.where(1).endswith("row 3")
    assert list(table.left_out.values()) == [1]
    assert f"1 of 3 rows are left out: {column} is 0 or no " in caplog.text


def test_bad_rows_are_counted_by_reason_up_to_a_share(folder, caplog):
    rows = [f"{i}.mp4,{i},{i + 1}" for i in range(16)]
    rows[3] = "gone.mp4,3,4"
    rows[5] = "5.mp4,5,0"
    rows[6] = "6.txt,6,7"
    rows[9] = "also_gone.mp4,9,10"
    path = write(folder, "path,text,num_frames\n" + "\n".join(rows))
    table = read_table(path, max_bad_share=0.25)
    assert table.left_out == {
        "they have no known extension": 1,
        "num_frames is 0 or no number of frames": 1,
        "they name a file that does not exist": 2,
    }
    for row in range(len(table)):  # whole rows: nothing is shifted
        number = int(Path(table.name(row)).stem)
        assert table.captions(row) == [str(number)]
        assert table.num_frames[row] == number + 1
        assert table.where(row).endswith(f"row {number + 1}")
    assert "also_gone.mp4" in caplog.text
    with pytest.raises(
        UserError, match=r"2 of 14 rows name a file .*\n  row 4: .*gone.mp4\n(.*\n)*.*max_bad_share=0.2 of all"
    ):
        read_table(path, max_bad_share=0.2)


def test_urls_are_no_paths(folder):
    with pytest.raises(UserError, match=r"1 of 1 rows name a URL:.*\n.*\n.*Download the files first"):
        read_table(write(folder, "path,text\nhttps://example.com/0.mp4,a\n"))


def test_flow_is_a_number_or_empty(folder):
    table = read_table(write(folder, "path,text,flow\n0.mp4,a,5\n1.mp4,b,\n"))
    assert table.scores(0) == {"flow": 5.0}
    assert np.isnan(table.scores(1)["flow"])
    assert table.without([0], "said so").scores(0).keys() == {"flow"}
    assert read_table(write(folder, "path,text\n0.mp4,a\n")).scores(0) == {}
    with pytest.raises(UserError, match=r"flow='-1' in row 2 is no score \(rows 2\); write a number from 0"):
        read_table(write(folder, "path,text,flow\n0.mp4,a,0\n1.mp4,b,-1\n"))


# ------------------------------------------------------------------------------------------------------- status


def test_rows_whose_status_is_not_ok_are_left_out(folder, caplog):
    """`--info` and the scorers leave the numbers of a broken file empty, and say why in `status`."""
    text = "path,text,num_frames,status\n0.mp4,a,24,ok\n1.mp4,b,,1.mp4 is truncated\n2.mp4,c,24,\n3.mp4,d,24,ok\n"
    path = write(folder, text)
    message = r"1 of 4 rows have a status that is not 'ok':\n  row 2: .*1.mp4\nThe first says '1.mp4 is truncated'.*--remove-b"
    with pytest.raises(UserError, match=message):
        read_table(path)
    table = read_table(path, max_bad_share=0.25)
    assert [table.captions(row) for row in range(len(table))] == [["a"], ["c"], ["d"]]
    assert [table.where(row).split()[-1] for row in range(3)] == ["1", "3", "4"]
    assert table.left_out == {"they have a status that is not 'ok'": 1}
    assert "1 of 4 rows are left out: they have a status that is not 'ok' (1.mp4)" in caplog.text
    with pytest.raises(UserError, match=r"max_bad_share=0.2 of all rows"):
        read_table(path, max_bad_share=0.2)


def test_what_the_tools_write_for_broken_files_is_read(folder, monkeypatch):
    """With the tools themselves: every file here is one byte."""
    from tools.datasets.datautil.__main__ import main

    Image.new("RGB", (8, 8)).save(folder / "good.png")
    source = write(folder, "path,text\ngood.png,a\n0.mp4,b\n")
    monkeypatch.setattr(sys, "argv", ["datautil", str(source), "--info", "--output", str(folder / "info.csv")])
    main()
    table = read_table(folder / "info.csv", max_bad_share=0.5)
    assert [table.name(row) for row in range(len(table))] == ["good.png"]
    assert list(table.left_out.values()) == [1]


def test_somebody_elses_status_says_nothing(folder):
    table = read_table(write(folder, "path,text,status\n0.mp4,a,success\n1.mp4,b,success\n2.mp4,c,\n"))
    assert len(table) == 3
