"""Tables are checked all rows at once; here every rule is asked again of each row alone, over tables of hostile cells."""

import csv
import hashlib
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from opensora.datasets.table import files
from opensora.datasets.table.table import EXTENSIONS, TextColumn, encode, has_extension, read_table
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.utils.errors import UserError

PATHS = [
    "a.mp4", "A.MP4", ".mp4", "x/.mp4", "..mp4", "x/..mp4", "a.mp4/", "a.mp4/.", "mp4", "a.ts", ".ts", "a.m2ts", "s.M2TS", "a.avifs", "é.webm",
    "a.mp4.txt", "a.txt.mp4", "a.", "", ".", "a.mp4 ", "x.mp4/b", "湖/雪.jpeg", "a@.jpg", "a[mp4", "http://x/a.mp4", "HTTP://x/a.mp4",
    "https://x/a.mp4", "s3://b/a.jpg", "gs://b/a.jpg", "ftp://b/a.png", "xs3://b/a.png", "http:/x/a.mp4", "c:/a.mp4", "dir:/a.mp4", "abcd:/x.mp4",
]  # fmt: skip
CAPTIONS = [
    "",
    "NA",
    "null",
    "a, b",
    'say "hi"',
    "two\nlines",
    "cr\r",
    "\u2028",
    "émoji 🎬",
    "\ufeffbom",
    "z" * 300,
    "1.50",
    " ",
    "'",
]
CELLS = ["", "", "1", "16", "7.0", "23.976", "29.97002997002997", "23.976023976023978", "1e2", "0", "-3", "2.5", "nan", "inf", "many", " ", " 5",
         "9007199254740993", "18446744073709551615", "True", "0x10", "1_0", "007"]  # fmt: skip
STATUS = ["ok", "ok", "", "OK", "okay", "ko", "no", "a.mp4 is truncated"]
GOOD = {
    "path": ["a.mp4", "x/b.JPG"],
    "text": CAPTIONS,
    "height": ["", "240", "7.0"],
    "fps": ["", "29.97"],
    "status": ["ok", ""],
}
KNOWN = "they have no known extension"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 7)


def write(path: Path, columns: dict[str, list[str]]) -> Path:
    """The same texts in any format; a JSONL file leaves empty cells out, so that columns begin late."""
    rows = list(zip(*columns.values(), strict=True))
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([list(columns), *rows])
    elif path.suffix == ".jsonl":
        lines = [json.dumps({n: c for n, c in zip(columns, row, strict=True) if c or n == "path"}) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        pd.DataFrame(columns, dtype=object).to_parquet(path, row_group_size=11)
    return path


def expected(columns: dict[str, list[str]]) -> tuple[list[int], dict[str, int], dict[str, np.ndarray]]:
    """The rows that stay, why the others do not, and the numbers of all: each rule in turn, row by row."""
    rows, left_out = list(range(len(columns["path"]))), {}
    numbers = {}

    def drop(reason: str, bad: list[int]) -> None:
        nonlocal rows
        if found := [row for row in rows if row in set(bad)]:
            left_out[reason] = len(found)
            rows = [row for row in rows if row not in set(bad)]

    paths = columns["path"]
    drop(KNOWN, [row for row in rows if Path(paths[row]).suffix.lower() not in EXTENSIONS])
    drop("they name a URL", [row for row in rows if re.match(r"(https?|s3|gs|ftp)://", paths[row])])
    if "ok" in columns["status"]:
        odd = [row for row, cell in enumerate(columns["status"]) if cell not in ("ok", "")]
        drop("they have a status that is not 'ok'", odd)
    what = {"num_frames": "number of frames", "height": "height in pixels", "width": "width in pixels", "fps": "rate"}
    for name, meaning in what.items():
        values = []
        for cell in columns.get(name, [""] * len(paths)):
            value = float(pd.to_numeric(pd.Series([cell], dtype=object), errors="coerce").iloc[0])
            good = 0 < value < 2**53 and (name == "fps" or value == int(value))
            values.append(value if good else (np.nan if name == "fps" else 0) if cell == "" else -1)
        numbers[name] = np.array(values, np.float64 if name == "fps" else np.int64)
        drop(f"{name} is 0 or no {meaning}", [row for row, value in enumerate(values) if value == -1])
    return rows, left_out, numbers


def pick(rng: random.Random, count: int, hostile: float) -> dict[str, list[str]]:
    """Columns of mostly good cells, so that some rows stay."""
    odd = {"path": PATHS, "text": CAPTIONS, "height": CELLS, "fps": CELLS, "status": STATUS}
    return {
        name: [rng.choice(odd[name] if rng.random() < hostile else GOOD[name]) for _ in range(count)] for name in GOOD
    }


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("seed", range(6))
def test_all_rows_at_once_are_each_row_alone(tmp_path, suffix, seed):
    columns = pick(random.Random(seed), count=[1, 7, 8, 50, 200, 400][seed], hostile=0.3)
    read = read_table(write(tmp_path / f"t{suffix}", columns), check_files=False, max_bad_share=1.0)
    rows, left_out, numbers = expected(columns)
    assert read.left_out == left_out
    assert read.numbers.tolist() == rows
    assert read.rows["path"].tolist() == [columns["path"][row] for row in rows]
    assert read.rows["text"].tolist() == [columns["text"][row] for row in rows]
    for name, values in numbers.items():
        np.testing.assert_array_equal(getattr(read, name), values[rows])
        assert getattr(read, name).dtype == values.dtype
    digest = hashlib.blake2b(repr(("text",)).encode(), digest_size=16)
    for name in ("path", "text"):
        for row in rows:
            text = columns[name][row].encode()
            digest.update(len(text).to_bytes(8, "little") + text)
    digest.update(numbers["num_frames"][rows].tobytes())
    assert read.fingerprint() == digest.hexdigest()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("path", ".mp4", r"1 of 60 rows have no known extension:\n  row {}: .*\.mp4\n"),
        ("path", "s3://a.mp4", r"1 of 60 rows name a URL:\n  row {}: "),
        ("height", "2.5", r"height='2.5' in row {} is no height in pixels \(rows {}\); write a whole"),
        ("fps", "many", r"fps='many' in row {} is no rate \(rows {}\); write a number"),
        ("status", "KO", r"1 of 60 rows have a status that is not 'ok':\n  row {}: .*\nThe first says 'KO'"),
    ],
)
def test_the_one_bad_cell_is_named(tmp_path, suffix, column, cell, message):
    for seed, row in enumerate((0, 6, 7, 41, 59)):
        columns = pick(random.Random(seed), 60, hostile=0)
        columns[column][row] = cell
        source = write(tmp_path / f"{seed}{suffix}", columns)
        with pytest.raises(UserError, match=message.replace("{}", str(row + 1))):
            read_table(source, check_files=False)


def test_numbers_of_parquet_are_those_of_text(tmp_path):
    """Also whole numbers with gaps, small floats, and numbers where text should be."""
    frame = pd.DataFrame({"path": [f"{i}.mp4" for i in range(4)], "text": pd.array([2**60 + 1, None, 3, 4], "Int64")})
    frame["num_frames"] = pd.array([16, None, 3, 2**31], "Int64")
    frame["fps"] = np.array([24000 / 1001, np.nan, 29.97, 25], np.float32)
    frame["width"] = ["640", "", None, "1.0"]
    frame.to_parquet(tmp_path / "t.parquet")
    read = read_table(tmp_path / "t.parquet", check_files=False)
    assert read.rows["text"].tolist() == [str(2**60 + 1), "", "3", "4"]
    assert read.num_frames.tolist() == [16, 0, 3, 2**31]
    assert read.width.tolist() == [640, 0, 0, 1]
    # by way of their text, as ever: pandas 2's parser is off by a bit at times, and a resumed run needs the same numbers
    texts = pd.Series(["" if value != value else repr(value) for value in frame["fps"].tolist()], dtype=object)
    np.testing.assert_array_equal(read.fps, pd.to_numeric(texts, errors="coerce"))
    frame["num_frames"] = pd.array([16, None, -3, 5], "Int64")
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"num_frames='-3' in row 3 is no number of frames \(rows 3\)"):
        read_table(tmp_path / "t.parquet", check_files=False)


def test_extensions_are_those_of_pathlib():
    rng = random.Random(0)
    names = PATHS + ["".join(rng.choices("./amptsMP4jgé", k=rng.randrange(9))) for _ in range(3000)]
    names += [stem + e for e in EXTENSIONS for stem in ("", "a", "/", "a/", ".", os.fsdecode(b"caf\xe9"))]
    for known in (EXTENSIONS, EXTENSIONS[:3]):
        expected = [Path(name).suffix.lower() in known for name in names]
        assert has_extension(TextColumn.of(names), known).tolist() == expected


def test_columns_that_begin_late(tmp_path):
    rows = [{"path": f"{i}.mp4"} for i in range(20)]
    rows += [{"path": f"{i}.mp4", "text": str(i), "num_frames": i, "flow": i, "status": "ok"} for i in range(20, 30)]
    rows[25]["status"] = "broken"
    read = read_table(write_lines(tmp_path, rows), check_files=False, max_bad_share=0.1)
    assert read.numbers.tolist() == [row for row in range(30) if row != 25]
    assert read.rows["text"].tolist() == [""] * 20 + [str(row) for row in (*range(20, 25), *range(26, 30))]
    assert read.num_frames[:21].tolist() == [0] * 20 + [20]
    assert read.flow is not None
    assert np.isnan(read.flow[:20]).all()
    assert read.flow[20:].tolist() == [*range(20, 25), *range(26, 30)]


@pytest.mark.parametrize(
    ("cell", "message"),
    [(b"a lake", "'text' is bytes, not text; cast the column"), (["a", "b"], "'text' is not one value; give each")],
    ids=["bytes", "list"],
)
def test_a_caption_of_another_type_is_named_with_its_row(tmp_path, cell, message):
    write_table(pa.table({"path": ["a.mp4", "b.mp4"], "text": [None, cell]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=rf"t\.parquet, row 2: {message}"):
        read_table(tmp_path / "t.parquet")


def test_bytes_that_are_no_utf_8_are_refused(tmp_path):
    texts = pa.array([b"a.mp4", b"caf\xe9.mp4"]).view(pa.string())
    write_table(pa.table({"path": texts, "text": texts}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"t\.parquet is no readable parquet file"):
        read_table(tmp_path / "t.parquet", check_files=False)


def test_an_epoch_has_its_own_buckets(tmp_path):
    source = write(tmp_path / "t.csv", {"path": ["a.mp4"] * 40, "text": [""] * 40, "num_frames": ["9"] * 40})
    rows = pd.read_csv(source).assign(height=64, width=64, path=[f"{i}.mp4" for i in range(40)])
    rows.to_csv(source, index=False)
    for name in rows["path"]:
        (tmp_path / name).touch()
    dataset = VariableVideoTextDataset(str(source), {"64x64": {8: (0.5, 1)}}, seed=3)
    columns = (dataset.num_frames, dataset.height, dataset.width)
    for epoch in (0, 0, 1, 0):
        wanted = dataset.buckets.assign(*columns, seed=3, epoch=epoch)
        np.testing.assert_array_equal(dataset.assign(epoch).bucket, wanted.bucket)
    assert not np.array_equal(dataset.assign(0).bucket, dataset.assign(1).bucket)


def test_a_caption_is_no_list_wherever_it_is(tmp_path):
    rows = [{"path": f"{i}.mp4", "text": "a", "status": ["odd"]} for i in range(30)]
    read_table(write_lines(tmp_path, rows), check_files=False)  # a column that is somebody else's may hold one
    rows[20]["text"] = {"short": "a"}
    with pytest.raises(UserError, match=r"row 21: 'text' is not one value"):
        read_table(write_lines(tmp_path, rows), check_files=False)


def write_lines(folder: Path, rows: list[dict]) -> Path:
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "t.jsonl"


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_arrow_texts_are_taken_as_they_are(kind):
    """Also part of an array, and where bytes lie behind a null."""
    texts = pa.array(["out", "é", "hidden", "", "b", "out"], kind)
    _, offsets, data = texts.buffers()
    holed = pa.Array.from_buffers(texts.type, 6, [pa.py_buffer(bytes([0b111011])), offsets, data])
    blocks = [encode(cells) for cells in (holed[1:5], ["x"], holed[:0], pa.array([None], kind), holed[4:])]
    column = TextColumn(pa.chunked_array(blocks))
    assert column.tolist() == ["é", "", "", "b", "x", "", "b", "out"]
