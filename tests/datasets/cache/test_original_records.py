"""Folders of the package `codewithgpu`: one that its version 0.2.8 wrote (`codewithgpu_records.json`), and, where it is, new ones."""

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from opensora.datasets.cache.original_records import OriginalRecords, is_original
from opensora.datasets.cache.records import RecordWriter
from opensora.datasets.cache.records_dataset import RecordVideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.utils.errors import UserError

PACKAGE = "OPENSORA_TEST_CODEWITHGPU"
"""`pip install --no-deps --target DIR codewithgpu==0.2.8 protobuf==3.20.3`, and set this to DIR. It is in no extra: it would hold
protobuf, which others use too, below 4."""
FILES = Path(__file__).parent / "codewithgpu_records.json"
"""Name -> content, in base64, of the files of a folder that the package wrote with the code below."""
WRITE = """
import sys, codewithgpu, numpy as np
features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"], "flow": "float64", "number": "int64"}
with codewithgpu.RecordWriter(sys.argv[1], features, max_examples=2) as writer:
    for i in range(3):
        x = np.random.default_rng(i).normal(size=(4, 2, 2, 4)).astype(np.float16)
        writer.write({"shape": x.shape, "moments": x.tobytes(), "caption": f"long {i}. \\u6e56", "text": "short" if i else "",
                      "flow": i / 3, "number": (-1) ** i * 10 ** (6 * i)})
"""
"""What wrote the folder; as in NOVA's guide, with one field more."""
FEATURES = {
    "moments": "bytes",
    "caption": "string",
    "text": "string",
    "shape": ["int64"],
    "flow": "float64",
    "number": "int64",
}


def written(i: int) -> dict:
    x = np.random.default_rng(i).normal(size=(4, 2, 2, 4)).astype(np.float16)
    return {"shape": [4, 2, 2, 4], "moments": x.tobytes(), "caption": f"long {i}. 湖", "text": "short" if i else "",
            "flow": float(np.float32(i / 3)), "number": (-1) ** i * 10 ** (6 * i)}  # fmt: skip


def assert_holds_what_was_written(folder: Path) -> None:
    records = OriginalRecords(folder)
    assert (len(records), records.features) == (3, FEATURES)
    for i in (2, 0, 1, -1):
        assert records[i] == written(i % 3)
    assert records.at(1, ("flow", "shape")) == {"flow": float(np.float32(1 / 3)), "shape": [4, 2, 2, 4]}
    with pytest.raises(IndexError):
        records[3]


def unpack(folder: Path) -> Path:
    folder.mkdir()
    for name, content in json.loads(FILES.read_text()).items():
        (folder / name).write_bytes(base64.b64decode(content))
    return folder


@pytest.fixture
def copy(tmp_path) -> Path:
    """The folder that the package wrote."""
    return unpack(tmp_path / "copy")


def test_what_the_package_wrote_is_read(copy):
    assert len(list(copy.glob("*.data"))) == 2
    assert_holds_what_was_written(copy)


@pytest.mark.skipif(
    PACKAGE not in os.environ, reason=f"needs codewithgpu and its old protobuf; see {PACKAGE} in this file"
)
def test_what_the_package_writes_now_is_read(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.environ[PACKAGE]}
    subprocess.run([sys.executable, "-c", WRITE, str(tmp_path)], env=environment, check=True)
    assert_holds_what_was_written(tmp_path)


def test_samples_are_those_of_our_own_records(copy, tmp_path):
    with RecordWriter(tmp_path / "ours", FEATURES) as writer:
        for i in range(3):
            writer.write(written(i))
    theirs, ours = RecordVideoTextDataset(str(copy)), RecordVideoTextDataset(str(tmp_path / "ours"))
    assert is_original(copy)
    assert not is_original(tmp_path / "ours")
    for epoch in range(4):
        for i in range(3):
            one, other = theirs[SampleKey(epoch, i)], ours[SampleKey(epoch, i)]
            one.pop("path"), other.pop("path")
            assert torch.equal(one.pop("moments"), other.pop("moments"))
            assert one == other
    again = pickle.loads(pickle.dumps(theirs))
    assert torch.equal(again[SampleKey(0, 2)]["moments"], ours[SampleKey(0, 2)]["moments"])


def test_the_fingerprint_is_that_of_the_content(copy, tmp_path):
    before = RecordVideoTextDataset(str(copy)).fingerprint()
    assert before == RecordVideoTextDataset(str(unpack(tmp_path / "again"))).fingerprint()
    content = bytearray((copy / "00001.data").read_bytes())
    content[-1] ^= 1
    (copy / "00001.data").write_bytes(content)
    assert RecordVideoTextDataset(str(copy)).fingerprint() != before


def test_a_writer_that_was_not_closed(copy):
    (copy / "METADATA").unlink()
    with pytest.raises(UserError, match="its writer was not closed"):
        RecordVideoTextDataset(str(copy))


def test_files_that_do_not_fit_together(copy):
    index = (copy / "00000.index").read_text()
    (copy / "00000.index").write_text(index.splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=r"00000.data has \d+ bytes, and 00000.index says \d+"):
        OriginalRecords(copy)
    (copy / "00000.index").write_text(index)
    for name in ("00001.data", "00001.index"):
        (copy / name).unlink()
    with pytest.raises(UserError, match="METADATA counts 3 records, the index files 2"):
        OriginalRecords(copy)
    (copy / "00000.index").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        OriginalRecords(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "is not of version 1"),
        (
            {"features": {"caption": {"data": "BYTES", "shape": ["INT64"]}}},
            "the field 'caption' is .*cache the features with",
        ),
        ({"features": {"x": "DOUBLE"}}, "what is read are BYTES, STRING, FLOAT32, INT64"),
        ({"features": None, "entries": None}, "is not of version 1, with entries and features"),
    ],
)
def test_other_folders_are_refused(copy, change, message):
    content = {**json.loads((copy / "METADATA").read_text()), **change}
    (copy / "METADATA").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(UserError, match=message):
        OriginalRecords(copy)


def test_damaged_records_are_reported_or_differ_in_what_was_damaged(copy):
    """A byte of a length or a tag is found; one of a value cannot be, for the format has no checksums."""
    path = copy / "00001.data"
    content, reported = path.read_bytes(), 0
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 255]) + content[offset + 1 :])
        with contextlib.suppress(UserError):
            assert OriginalRecords(copy)[2] != written(2)
            continue
        reported += 1
    assert 30 < reported < len(content)
    path.write_bytes(b"\x0b" + content[1:])
    with pytest.raises(UserError, match=r"00001.data, record at 0, is damaged \(wire type 3\)"):
        OriginalRecords(copy)[2]
