"""Records: what is written is read, whatever stopped the writers; damage and foreign folders are reported."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from opensora.datasets.cache.records import INDEX, METADATA, RecordReader, RecordWriter, consolidate
from opensora.utils.errors import UserError

FEATURES = {"moments": "tensor", "caption": "string", "text": "string", "shape": ["int64"], "flow": "float64"}


def record(i: int) -> dict:
    moments = torch.randn(4, i % 3 + 1, 2, 3, generator=torch.Generator().manual_seed(i)).half()
    return {
        "moments": moments,
        "caption": f'long {i}, "quoted"\n湖 🐇',
        "text": "" if i == 2 else f"short {i}",
        "shape": moments.shape,
        "flow": i / 3,
    }


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype
            assert torch.equal(value, b[name]), name
        else:
            assert (list(value) if name == "shape" else value) == b[name], name


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-*.safetensors"))


@pytest.fixture
def folder(tmp_path) -> Path:
    with RecordWriter(tmp_path / "r", FEATURES, settings={"vae": "abc", "size": (1, 2)}, shard_bytes=100) as writer:
        for i in range(7):
            writer.write(record(i))
    return tmp_path / "r"


def test_random_access_by_number_and_by_key(folder):
    reader = RecordReader(folder)
    assert len(reader) == 7
    for i in (5, 0, 6, -1, 3):
        assert_same(record(i % 7), reader[i])
        assert_same(record(i % 7), reader.read(str(i % 7)))
    assert (reader.features, reader.settings) == (FEATURES, {"vae": "abc", "size": [1, 2]})
    assert json.loads((folder / METADATA).read_text())["entries"] == 7
    assert reader.read("4", ("flow", "text")) == {"flow": 4 / 3, "text": "short 4"}
    assert "7" not in reader
    with pytest.raises(KeyError):
        reader.read("7")
    with pytest.raises(IndexError):
        reader[7]
    assert {path.suffix for path in folder.iterdir()} == {"", ".safetensors"}


def test_a_shard_is_plain_safetensors(folder):
    tensors = load_file(shards(folder)[0])
    assert torch.equal(tensors["0/moments"], record(0)["moments"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_number_formats_and_odd_tensors(tmp_path, dtype):
    values = [torch.arange(6).reshape(2, 3).to(dtype), torch.ones((), dtype=dtype), torch.empty(0, 4, dtype=dtype)]
    values.append(torch.arange(12).reshape(3, 4).to(dtype).t())  # not contiguous
    with RecordWriter(tmp_path, {"x": "tensor", "raw": "bytes"}) as writer:
        for value in values:
            writer.write({"x": value, "raw": b"\0\xff" * len(value.shape)})
    reader = RecordReader(tmp_path)
    for i, value in enumerate(values):
        assert reader[i]["x"].dtype == dtype
        assert torch.equal(reader[i]["x"], value)
        assert reader[i]["raw"] == b"\0\xff" * len(value.shape)


def test_numpy_arrays_are_tensors(tmp_path):
    with RecordWriter(tmp_path, {"x": "tensor"}) as writer:
        writer.write({"x": np.arange(3, dtype=np.float16)})
    assert RecordReader(tmp_path)[0]["x"].tolist() == [0, 1, 2]


def test_a_later_writer_goes_on(folder):
    with RecordWriter(folder, FEATURES, settings={"vae": "abc", "size": (1, 2)}) as writer:
        assert "3" in writer
        assert "7" not in writer
        writer.write(record(7))
    reader = RecordReader(folder)
    assert_same(record(7), reader[7])
    assert_same(record(0), reader[0])


def test_a_record_written_again_replaces_the_first(folder):
    with RecordWriter(folder, FEATURES, settings={"vae": "abc", "size": (1, 2)}) as writer:
        writer.write(record(100), "3")
    reader = RecordReader(folder)
    assert len(reader) == 7
    assert_same(record(100), reader.read("3"))
    assert_same(record(2), reader.read("2"))


def test_without_close_the_finished_shards_are_kept(tmp_path):
    writer = RecordWriter(tmp_path, FEATURES, shard_bytes=100)
    for i in range(4):
        writer.write(record(i))
    written = len(shards(tmp_path))
    assert 1 <= written < 4
    del writer  # as if it were killed
    with pytest.raises(UserError, match="not finished: their writer was interrupted"):
        RecordReader(tmp_path)
    half = tmp_path / "00000009-x.safetensors.1.tmp"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    (tmp_path / "00000010-y.safetensors.2.tmp").write_bytes(b"of a writer that is at work")
    resumed = RecordWriter(tmp_path, FEATURES)
    todo = [i for i in range(4) if str(i) not in resumed]
    assert 0 < len(todo) < 4
    for i in todo:
        resumed.write(record(i), str(i))
    resumed.close()
    assert len(shards(tmp_path)) == written + 1
    assert [file.name for file in tmp_path.glob("*.tmp")] == ["00000010-y.safetensors.2.tmp"]
    reader = RecordReader(tmp_path)
    for i in range(4):
        assert_same(record(i), reader.read(str(i)))


def test_writers_that_share_a_folder_do_not_overwrite_each_other(tmp_path):
    writers = [RecordWriter(tmp_path, FEATURES) for _ in range(3)]
    for i in range(9):
        writers[i % 3].write(record(i), f"key {i}")
    for writer in writers:
        writer.flush()
    assert len(shards(tmp_path)) == 3
    assert consolidate(tmp_path) == 9
    reader = RecordReader(tmp_path)
    for i in range(9):
        assert_same(record(i), reader.read(f"key {i}"))


def test_any_flipped_byte_of_a_shard_is_detected(folder):
    """Every record is read in full; no flip may pass unnoticed, and none may give other values."""
    shard = shards(folder)[1]
    content = shard.read_bytes()
    expected = {str(i): record(i) for i in range(7)}
    padding = 0
    for offset in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << offset % 8
        shard.write_bytes(flipped)
        reader = RecordReader(folder)
        problems = list(reader.check())
        if not problems:  # only the spaces that pad the header, or its own free text, may differ
            padding += 1
            for key, value in expected.items():
                assert_same(value, reader.read(key))
    assert padding < 0.05 * len(content) / 3
    shard.write_bytes(content)
    assert list(RecordReader(folder).check()) == []


def test_damage_is_reported_when_it_is_read(folder):
    shard = shards(folder)[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 255
    shard.write_bytes(content)
    reader = RecordReader(folder, remedy="Run the tool.")
    problems = list(reader.check())
    assert len(problems) == 1
    assert f"{shard}, record" in problems[0]
    assert "delete the file. Run the tool." in problems[0]
    shard.write_bytes(content[:40])
    with pytest.raises(UserError, match="cannot be read"):
        RecordReader(folder)[0]
    shard.unlink()
    with pytest.raises(UserError, match=f"1 files of the cache .* are missing, such as {shard.name}"):
        RecordReader(folder)


def test_what_a_deleted_shard_held_is_written_again(folder):
    shards(folder)[0].unlink()
    with RecordWriter(folder, FEATURES, settings={"vae": "abc", "size": (1, 2)}) as writer:
        lost = [i for i in range(7) if str(i) not in writer]
        assert lost
        for i in lost:
            writer.write(record(i), str(i))
    reader = RecordReader(folder)
    for i in range(7):
        assert_same(record(i), reader.read(str(i)))


def test_foreign_folders_are_refused_with_the_reason(folder, tmp_path):
    with pytest.raises(
        UserError, match=r"made with other settings: vae is abc, not def; size is \[1, 2\], not \[1, 3\]"
    ):
        RecordWriter(folder, FEATURES, settings={"vae": "def", "size": (1, 3)})
    with pytest.raises(UserError, match=r"made with other fields: flow is float64, not string"):
        RecordWriter(folder, {**FEATURES, "flow": "string"}, settings={"vae": "abc", "size": (1, 2)})
    with pytest.raises(UserError, match=r"made with other fields: flow is float64, not None"):
        RecordWriter(
            folder, {k: v for k, v in FEATURES.items() if k != "flow"}, settings={"vae": "abc", "size": (1, 2)}
        )
    with pytest.raises(UserError, match=r"there is no cache in .* Do this"):
        RecordReader(tmp_path / "nowhere", remedy="Do this.")
    (folder / METADATA).write_text('{"format": 99}')
    with pytest.raises(UserError, match="has format 99, not 2"):
        RecordReader(folder)
    for content, message in (("{", "is no valid JSON"), ('{"format": 2}', "does not describe a cache: KeyError")):
        (folder / METADATA).write_text(content)
        with pytest.raises(UserError, match=message):
            RecordReader(folder)


def test_an_index_that_does_not_fit_is_refused(folder):
    content = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps({**content, "entries": 8}))
    with pytest.raises(UserError, match=f"{INDEX} has 7 of 8 records"):
        RecordReader(folder)
    (folder / METADATA).write_text(json.dumps(content))
    (folder / INDEX).write_bytes(b"x" * 20)
    with pytest.raises(UserError, match=f"{INDEX} cannot be read"):
        RecordReader(folder)


def test_mistakes_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="'image' is not one of"):
        RecordWriter(tmp_path, {"x": "image"})
    writer = RecordWriter(tmp_path, {"x": "tensor", "s": "string"})
    with pytest.raises(ValueError, match="but the features are"):
        writer.write({"x": torch.ones(1)})
    with pytest.raises(ValueError, match="is no string"):
        writer.write({"x": torch.ones(1), "s": None})


def test_a_reader_survives_pickling(folder):
    reader = RecordReader(folder)
    reader[0]
    assert_same(record(3), pickle.loads(pickle.dumps(reader))[3])
