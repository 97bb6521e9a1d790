"""Tables block by block against the readers and writers of whole tables."""

import json

import numpy as np
import pandas as pd
import pytest

from opensora.datasets.table.files import read_frame
from opensora.utils.errors import UserError
from tools.datasets.datautil.io import write_frames
from tools.datasets.stream import columns_of, count_rows, read_blocks, write_blocks
from tools.footage.rows import divide_rows, read_rows, write_rows

KINDS = ("csv", "jsonl", "parquet")
ODD = ["NA", "", "a, b", 'the "quick"\nfox', "a\rb", "0.50", "007", "🦊", "é"]


@pytest.fixture(params=KINDS)
def table(request, tmp_path):
    """A table with odd captions, gaps and numbers."""
    frame = pd.DataFrame(
        {
            "path": [f"{i}.mp4" for i in range(len(ODD))],
            "text": pd.Series(ODD, dtype=object),
            "num_frames": [str(i) if i % 3 else "" for i in range(len(ODD))],
            "aes": [f"{i}.50" if i % 2 else "" for i in range(len(ODD))],
        }
    )
    path = tmp_path / f"table.{request.param}"
    write_frames([frame], [path])
    return path


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_made_in_blocks_is_the_copy_made_at_once(table, tmp_path, rows, kind):
    whole, blocks = tmp_path / f"whole.{kind}", tmp_path / f"blocks.{kind}"
    write_frames([read_frame(table)], [whole])
    assert write_blocks(blocks, columns_of(table), read_blocks(table, rows)) == len(ODD) == count_rows(table)
    expected, made = read_frame(whole), read_frame(blocks)
    assert list(made.columns) == list(expected.columns)
    for name in expected.columns:
        assert made[name].map(str).tolist() == expected[name].map(str).tolist()


def test_blocks_have_the_rows_asked_for_also_across_row_groups(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"path": np.arange(10), "x": np.arange(10) / 2}).to_parquet(path, row_group_size=3, index=False)
    blocks = list(read_blocks(path, 4, ["x"]))
    assert [len(block["x"]) for block in blocks] == [4, 4, 2]
    assert [x for block in blocks for x in block["x"]] == (np.arange(10) / 2).tolist()


def test_a_column_that_begins_empty_gets_its_type_later(tmp_path):
    path = tmp_path / "t.parquet"
    blocks = [{"flow": [None, None], "ocr": [3, None]}, {"flow": [1.5, 2], "ocr": [1, 2]}]
    write_blocks(path, ["flow", "ocr"], iter(blocks))
    frame = read_frame(path)
    assert frame["flow"].tolist()[2:] == [1.5, 2.0]
    assert frame["ocr"].dtype == "Int64"


@pytest.mark.parametrize("name", ["text", "\\ud83d", "inside"])
def test_half_an_emoji_is_refused_where_it_is(tmp_path, name):
    path = tmp_path / "t.jsonl"
    cell = '{"deep": ["\\ud83d"]}' if name == "inside" else '"a fox \\ud83d"'
    path.write_text('{"path": "a.mp4", "text": "a fox \\ud83e\\udd8a"}\n' + f'{{"path": "b.mp4", "{name}": {cell}}}\n')
    for read in (columns_of, count_rows, lambda table: list(read_rows(table))):
        with pytest.raises(UserError, match=r"t\.jsonl, line 2: .* half of a character"):
            read(path)


def test_half_an_emoji_of_a_program_is_refused_by_all_that_write(tmp_path):
    row = {"path": "a.mp4", "text": "a fox \ud83d"}
    for kind in ("csv", "jsonl"):
        with pytest.raises(UserError, match=rf"o\.{kind}: a cell holds '.ud83d'"):
            write_blocks(tmp_path / f"o.{kind}", list(row), [{name: [cell] for name, cell in row.items()}])
    with pytest.raises(UserError, match="is no text"):
        write_rows(tmp_path / "o.jsonl", [row])
    with pytest.raises(UserError, match="is no text"):
        divide_rows(tmp_path / "k.jsonl", tmp_path / "d.jsonl", [(row, "")])
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_named_and_leaves_no_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("path,text\na.mp4,one\nb.mp4,two,three\n")
    with pytest.raises(UserError, match="has 2 columns, but row 2 has 3 cells"):
        list(read_blocks(path, 10))
    with pytest.raises(UserError, match=r"no column 'txet'.*Did you mean 'text'"):
        list(read_blocks(path, 10, ["txet"]))
    with pytest.raises(UserError, match="row 2"):
        write_blocks(tmp_path / "o.jsonl", ["path", "text"], read_blocks(path, 1))
    with pytest.raises(UserError, match="does not exist"):
        columns_of(tmp_path / "none.csv")
    (tmp_path / "d.csv").write_text("path,path\n")
    with pytest.raises(UserError, match="more than one column 'path'"):
        columns_of(tmp_path / "d.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.csv", "t.csv"]


@pytest.mark.parametrize("block_rows", [3, 6])
def test_parquet_cuts_no_number(tmp_path, block_rows):
    rows = [{"path": "a.mp4", "seconds": 10}] * 3 + [{"path": "b.mp4", "seconds": 10.5}] * 3
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write = lambda: write_blocks(tmp_path / "a.parquet", ["path", "seconds"], read_blocks(source, block_rows))  # noqa: E731
    if block_rows == 3:  # the first block shows whole numbers
        with pytest.raises(UserError, match=r"'seconds' begins with whole numbers, and has 10\.5 later.*write JSONL"):
            write()
    else:
        assert write() == 6
        [block] = read_blocks(tmp_path / "a.parquet", 10)
        assert block["seconds"] == [10, 10, 10, 10.5, 10.5, 10.5]


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_hashes_of_64_bits_come_out_as_they_went_in(tmp_path, source, target):
    hashes = [2**63 + 1, 5, None, 2**64 - 1]
    frame = pd.DataFrame({"path": list("abcd"), "hash": pd.array(hashes, dtype="UInt64")})
    write_frames([frame], [tmp_path / f"t.{source}"])
    write_rows(tmp_path / f"u.{target}", read_rows(tmp_path / f"t.{source}"), ["path", "hash"])
    found = [row["hash"] for row in read_rows(tmp_path / f"u.{target}")]
    assert found == (["" if x is None else str(x) for x in hashes] if target == "csv" else hashes)


@pytest.mark.parametrize("blocks", [[[2**63, -1]], [[1], [2**63]], [[2**64]], [[2**63], [-1]]])
def test_whole_numbers_that_parquet_cannot_hold_are_said(tmp_path, blocks):
    with pytest.raises(
        UserError, match=r"column 'hash' has whole numbers of which u?int64 does not hold all.*write JSONL"
    ):
        write_blocks(tmp_path / "t.parquet", ["hash"], iter([{"hash": values} for values in blocks]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ['{"path": "a.mp4", "path": "b.mp4"}', '{"path": "a.mp4", "more": {"x": 1, "x": 2}}'])
def test_a_name_that_is_there_twice_is_refused_as_by_the_reader_of_whole_tables(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    for read in (columns_of, read_frame, lambda source: list(read_rows(source))):
        with pytest.raises(UserError, match=r"line 1: no valid JSON \('(path|x)' is there twice\)"):
            read(path)
