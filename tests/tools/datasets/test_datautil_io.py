"""Tables come out as they went in, whatever is in them."""

import json
import resource

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opensora.datasets.table.files import BLOCK, FORMATS, read_frame, strings
from opensora.datasets.table.table import read_table
from opensora.utils.errors import UserError
from tools.datasets.datautil.combine import find_tables
from tools.datasets.datautil.io import to_numbers, write_frames

TEXTS = [
    "NA", "None", "nan", "null", "", " ", "0.50", "007", "a, b", 'say "hi"', "two\nlines", "cr\rlf\r\nend", "\ttab",
    "雨の街 🌧️", "ünïcode \u2028 line", "\ufeffbom", "<b>&amp;</b>", "-", "1e5", "True", "'", '"', "#", "x" * 5000,
]  # fmt: skip


def text_frame():
    frame = {"path": [f"{i}.mp4" for i in range(len(TEXTS))], "text": TEXTS, "a column, odd": TEXTS[::-1]}
    return pd.DataFrame(frame, dtype=object)


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_texts_survive_every_way_from_format_to_format(tmp_path, first, second):
    frame = text_frame()
    for name in (first, second):
        write_frames([frame], [tmp_path / f"t.{name}"])
        frame = read_frame(tmp_path / f"t.{name}")
    assert frame.to_dict("list") == text_frame().to_dict("list")
    assert all(type(value) is str for column in frame for value in frame[column])


@pytest.mark.parametrize("name", FORMATS)
def test_training_reads_the_same_captions(tmp_path, name):
    write_frames([text_frame()], [tmp_path / f"t.{name}"])
    table = read_table(tmp_path / f"t.{name}", check_files=False)
    assert table.rows["text"].tolist() == TEXTS


def test_a_csv_is_written_back_to_the_letter(tmp_path, clips_csv):
    write_frames([read_frame(clips_csv)], [tmp_path / "t.csv"])
    assert (tmp_path / "t.csv").read_bytes() == clips_csv.read_bytes().replace(b"\r\n", b"\n")


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_numbers_are_numbers_in_formats_that_have_them(tmp_path, name):
    source = pd.DataFrame(
        {
            "path": ["a", "b", "c"],
            "num_frames": ["16", "", "24"],
            "fps": ["29.97", "nan", "24"],
            "code": ["1", "2", "3"],
        }
    ).astype(object)
    write_frames([source], [tmp_path / f"t.{name}"])
    frame = read_frame(tmp_path / f"t.{name}")
    assert frame["num_frames"].isna().tolist() == [False, True, False]
    assert frame["num_frames"].dropna().tolist() == [16, 24]
    assert str(frame["num_frames"].dtype) == "Int64"
    np.testing.assert_array_equal(frame["fps"].to_numpy(np.float64), [29.97, np.nan, 24])
    assert frame["code"].tolist() == ["1", "2", "3"]  # its name says nothing of numbers
    write_frames([frame], [tmp_path / "back.csv"])
    assert read_frame(tmp_path / "back.csv").to_dict("list") == {**source.to_dict("list"), "fps": ["29.97", "", "24"]}


def test_jsonl_keeps_what_has_no_place_in_a_csv(tmp_path):
    rows = [{"path": "a", "timestamp": [[0, 1.5]], "ok": True, "big": 2**70}, {"path": "b", "timestamp": None, "n": 3}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    frame = read_frame(tmp_path / "t.jsonl")
    write_frames([frame, frame], [tmp_path / "u.jsonl", tmp_path / "u.csv"])
    back = [json.loads(line) for line in (tmp_path / "u.jsonl").read_text().splitlines()]
    assert back[0] == {**rows[0], "n": None}
    assert back[1] == {"path": "b", "timestamp": None, "ok": None, "big": None, "n": 3}
    assert read_frame(tmp_path / "u.csv")["timestamp"].tolist() == ["[[0, 1.5]]", ""]


def test_tables_longer_than_a_block(tmp_path):
    count = 2 * BLOCK + 3
    frame = pd.DataFrame({"path": [f"{i}.mp4" for i in range(count)], "text": ["two\nlines"] * count}, dtype=object)
    for name in FORMATS:
        write_frames([frame], [tmp_path / f"t.{name}"])
        assert read_frame(tmp_path / f"t.{name}").to_dict("list") == frame.to_dict("list")
    with (tmp_path / "t.csv").open("a") as file:
        file.write("a,b,c\n")
    with pytest.raises(UserError, match=f"row {count + 1} has 3 cells"):
        read_frame(tmp_path / "t.csv")
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"late": 1}\n[]\n')
    with pytest.raises(UserError, match=f"line {count + 2}: not an object"):
        read_frame(tmp_path / "t.jsonl")


def test_a_named_index_of_pandas_is_a_column(tmp_path):
    pd.DataFrame({"text": ["x", None]}, index=pd.Index(["a.mp4", "b.mp4"], name="path")).to_parquet(
        tmp_path / "t.parquet"
    )
    assert read_frame(tmp_path / "t.parquet").to_dict("list") == {"path": ["a.mp4", "b.mp4"], "text": ["x", ""]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"path,text\na.mp4,one, two\n", "columns, but row 1 has 3 cells"),
        ("t.csv", b'path,text\na.mp4,"open\n', "is no valid CSV"),
        ("t.csv", b"path,text\na.mp4,\xff\n", "is not UTF-8"),
        ("t.csv", b"", "is empty"),
        ("t.csv", b"path,path\n", "more than one column 'path'"),
        ("t.jsonl", b'{"path": "a"}\n[1]\n', "line 2: not an object"),
        ("t.jsonl", b'{"path": "a"\n', "line 1: no valid JSON"),
        ("t.parquet", b"PAR1", "is no readable parquet"),
        ("t.txt", b"a", "is no table"),
    ],
)
def test_a_damaged_table_is_told_of(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_frame(tmp_path / name)


def test_a_parquet_file_with_text_that_is_none_is_told_of(tmp_path):
    good = pa.array(["a", "b"])
    buffers = good.buffers()
    bad = pa.Array.from_buffers(pa.string(), 2, [*buffers[:2], pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"path": bad}), tmp_path / "t.parquet")
    # of pyarrow 15 it is the reading that fails
    message = r"t\.parquet(: column 'path' holds bytes that are not UTF-8| is no readable parquet file)"
    with pytest.raises(UserError, match=message):
        read_frame(tmp_path / "t.parquet")


def test_what_a_file_cannot_hold_names_it(tmp_path):
    frame = pd.DataFrame({"path": ["a"], "raw": [b"\xff"]}, dtype=object)
    for name in ("t.csv", "t.jsonl"):
        with pytest.raises(UserError, match=rf"{name}: a column of bytes cannot be written as text"):
            write_frames([frame], [tmp_path / name])
    mixed = pd.DataFrame({"path": ["a", 1]}, dtype=object)
    with pytest.raises(UserError, match=r"t\.parquet: a column cannot be written as parquet"):
        write_frames([mixed], [tmp_path / "t.parquet"])


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_full_disk_names_the_file(tmp_path, name):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    frame = pd.DataFrame({"path": [str(i) * 9 for i in range(3000)]}, dtype=object)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        with pytest.raises(OSError, match=r"File too large") as raised:
            write_frames([frame], [tmp_path / name])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_link_to_itself_is_told_of(tmp_path):
    (tmp_path / "t.csv").symlink_to(tmp_path / "t.csv")
    with pytest.raises(UserError, match=r"t\.csv is a link to .*t\.csv, where there is no file"):
        read_frame(*find_tables([str(tmp_path / "t.csv")]))


def test_a_misspelt_table_has_a_suggestion(tmp_path):
    (tmp_path / "clips.csv").write_text("path\n")
    with pytest.raises(UserError, match=r"Did you mean 'clips\.csv'"):
        read_frame(tmp_path / "clip.csv")


def test_writing_is_all_or_nothing(tmp_path):
    good = pd.DataFrame({"path": ["a"]}, dtype=object)
    bad = pd.DataFrame({"path": ["\ud800"]}, dtype=object)
    (tmp_path / "1.csv").write_text("before")
    for name in FORMATS:
        with pytest.raises(UserError, match="is no text"):
            write_frames([good, bad], [tmp_path / "1.csv", tmp_path / f"2.{name}"])
    assert [path.name for path in tmp_path.iterdir()] == ["1.csv"]
    assert (tmp_path / "1.csv").read_text() == "before"


def test_only_empty_cells_are_no_numbers():
    column = pd.Series(["1", " 2.5 ", "", "NaN", "None", "1e3"], dtype=object)
    np.testing.assert_array_equal(to_numbers(column, "aes"), [1, 2.5, np.nan, np.nan, np.nan, 1000])
    with pytest.raises(UserError, match="aes: 'five' in row 2"):
        to_numbers(pd.Series(["1", "five"], dtype=object), "aes")


def test_an_empty_table_keeps_its_columns(tmp_path):
    for name in ("csv", "parquet"):
        write_frames([pd.DataFrame({"path": [], "text": []}, dtype=object)], [tmp_path / f"t.{name}"])
        assert list(read_frame(tmp_path / f"t.{name}").columns) == ["path", "text"]
    assert (tmp_path / "t.csv").read_text() == "path,text\n"


def test_numbers_without_end_are_read_as_they_are_written(tmp_path):
    frame = pd.DataFrame({"path": ["a", "b", "c"], "aes": [np.inf, -np.inf, 1.5]})
    write_frames([frame], [tmp_path / "t.jsonl"])
    assert read_frame(tmp_path / "t.jsonl")["aes"].astype(float).tolist() == [np.inf, -np.inf, 1.5]


BIG = [2**63 + 1, 2**64 - 1, 5, None]


@pytest.mark.parametrize("first", ["jsonl", "parquet"])
@pytest.mark.parametrize("second", FORMATS)
def test_hashes_of_64_bits_come_out_as_they_went_in(tmp_path, first, second):
    hashes = pd.array(BIG, dtype="UInt64")
    write_frames([pd.DataFrame({"path": list("abcd"), "hash": hashes})], [tmp_path / f"t.{first}"])
    write_frames([read_frame(tmp_path / f"t.{first}")], [tmp_path / f"u.{second}"])
    assert strings(read_frame(tmp_path / f"u.{second}")["hash"]).tolist() == ["" if x is None else str(x) for x in BIG]


@pytest.mark.parametrize("second", [[-1, 2**63 - 1], [3, 4], [2**63], [0.5, 2.0], [None, None]])
@pytest.mark.parametrize("source", ["jsonl", "parquet"])
@pytest.mark.parametrize("target", ["csv", "jsonl"])
def test_merging_keeps_whole_numbers_of_64_bits(tmp_path, datautil, source, target, second):
    hashes = pd.DataFrame({"path": list("abcd"), "hash": pd.array(BIG, dtype="UInt64")})
    write_frames([hashes], [tmp_path / f"a.{source}"])
    rows = [{"path": f"{i}.mp4", "hash": value} for i, value in enumerate(second)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = datautil(tmp_path / f"a.{source}", tmp_path / "b.jsonl", output=tmp_path / f"o.{target}")
    wanted = ["" if value is None else str(value).removesuffix(".0") for value in [*BIG, *second]]
    assert strings(out["hash"]).tolist() == wanted


@pytest.mark.parametrize("target", ["parquet", "jsonl"])
def test_whole_numbers_with_gaps_are_merged_as_whole_numbers(tmp_path, datautil, target):
    """pandas makes floats of them."""
    pd.DataFrame({"path": ["a", "b"], "hash": [2**60 + 1, 2**60 + 2]}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"path": ["c", "d"], "hash": [3.0, None]}).to_parquet(tmp_path / "b.parquet")
    out = datautil(tmp_path / "a.parquet", tmp_path / "b.parquet", output=tmp_path / f"o.{target}")
    assert strings(out["hash"]).tolist() == [str(2**60 + 1), str(2**60 + 2), "3", ""]


def test_a_column_of_mixed_numbers_stays_numbers(tmp_path, datautil):
    (tmp_path / "a.jsonl").write_text(f'{{"path": "a", "f": 1.5}}\n{{"path": "b", "f": {2**60 + 1}}}\n')
    (tmp_path / "b.jsonl").write_text('{"path": "c", "f": 3}\n')
    datautil(tmp_path / "a.jsonl", tmp_path / "b.jsonl", output=tmp_path / "o.jsonl")
    found = [json.loads(line)["f"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert found == [1.5, 2**60 + 1, 3]
    assert type(found[2]) is not str


def test_what_parquet_cannot_hold_is_said(tmp_path):
    frame = pd.DataFrame({"path": ["a", "b"], "n": pd.Series([2**64, -1], dtype=object)})
    with pytest.raises(UserError, match="cannot be written as parquet"):
        write_frames([frame], [tmp_path / "t.parquet"])


@pytest.mark.parametrize("name", ["csv", "jsonl"])
@pytest.mark.parametrize("unit", ["datetime64[ns]", "timedelta64[ns]"])
def test_a_missing_date_is_an_empty_cell(tmp_path, name, unit):
    pd.DataFrame({"path": ["a", "b"], "taken": pd.Series([1, None], dtype=unit)}).to_parquet(tmp_path / "t.parquet")
    write_frames([read_frame(tmp_path / "t.parquet")], [tmp_path / f"u.{name}"])
    cells = strings(read_frame(tmp_path / f"u.{name}")["taken"])
    assert [bool(cell) for cell in cells] == [True, False]
    assert "NaT" not in (tmp_path / f"u.{name}").read_text()
