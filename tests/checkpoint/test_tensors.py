"""Files of tensors and parts of tensors: what safetensors reads, what comes back under another layout, how much memory."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from opensora.checkpoint.tensors import DTYPES, SavedTensors, Shard, checksum, load_into, write_tensors
from opensora.utils.errors import UserError


def whole(tensor: torch.Tensor) -> Shard:
    return Shard(tensor, tuple(tensor.shape), (0,) * tensor.ndim, writes=True)


def shard(tensor: torch.Tensor, begin: tuple[int, ...], end: tuple[int, ...]) -> Shard:
    local = tensor[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))]
    return Shard(local, tuple(tensor.shape), begin, writes=True)


def test_safetensors_itself_reads_the_same(tmp_path):
    g = torch.Generator().manual_seed(0)
    tensors = {name: (torch.randn(3, 5, generator=g) * 4).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).t()
    record = write_tensors(tmp_path / "a", {n: whole(t) for n, t in tensors.items()}, {"step": "7"})
    assert record == ((tmp_path / "a").stat().st_size, checksum(tmp_path / "a"))
    theirs, ours = load_file(tmp_path / "a"), SavedTensors([tmp_path / "a"])
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (theirs[name], ours[name]):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found.float(), tensor.float()), name
        assert ours.meta(name).shape == tensor.shape
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"step": "7"}


@pytest.mark.parametrize("corners", [[(0, 0), (3, 0), (4, 0), (7, 5)], [(0, 0), (0, 2), (0, 3), (7, 5)]])
def test_any_region_of_any_shards(tmp_path, corners):
    tensor = torch.arange(35.0).reshape(7, 5)
    by_rows = corners[1][1] == 0
    edges = [corner[0 if by_rows else 1] for corner in corners]
    files = []
    for i, (first, last) in enumerate(pairwise(edges)):
        box = ((first, 0), (last, 5)) if by_rows else ((0, first), (7, last))
        files.append(tmp_path / f"{i}")
        write_tensors(files[-1], {"w": shard(tensor, *box), f"own{i}": whole(torch.tensor([i]))}, {})
    saved = SavedTensors(files)
    assert sorted(saved) == ["own0", "own1", "own2", "w"]
    assert torch.equal(saved["w"], tensor)
    for r0 in range(7):
        for r1 in range(r0 + 1, 8):
            for c0, c1 in ((0, 5), (1, 2), (2, 5)):
                assert torch.equal(saved.region("w", (r0, c0), (r1 - r0, c1 - c0)), tensor[r0:r1, c0:c1])
    assert saved.region("w", (7, 0), (0, 5)).shape == (0, 5)
    target = torch.zeros(7, 5, dtype=torch.float64)
    load_into(target, saved, "w")
    assert torch.equal(target, tensor.double())
    with pytest.raises(ValueError, match=r"stored shape is \(7, 5\), the wanted one \(5, 7\)"):
        load_into(torch.zeros(5, 7), saved, "w")


def test_what_is_mapped_may_be_changed_and_the_file_stays(tmp_path):
    write_tensors(tmp_path / "a", {"w": whole(torch.zeros(4))}, {})
    saved = SavedTensors([tmp_path / "a"])
    saved["w"].add_(1)
    assert torch.equal(saved["w"], torch.zeros(4))


def test_shards_that_are_not_the_whole_are_refused(tmp_path):
    write_tensors(tmp_path / "a", {"w": shard(torch.zeros(4, 2), (0, 0), (3, 2))}, {})
    with pytest.raises(UserError, match="6 of 8 elements of w"):
        SavedTensors([tmp_path / "a"])


def test_shards_of_different_tensors_are_refused(tmp_path):
    write_tensors(tmp_path / "a", {"w": shard(torch.zeros(4, 2), (0, 0), (2, 2))}, {})
    write_tensors(tmp_path / "b", {"w": shard(torch.zeros(5, 2), (2, 0), (5, 2))}, {})
    with pytest.raises(UserError, match="b is damaged: w is"):
        SavedTensors([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, (9).to_bytes(8, "little") + b'{"a": 3} ', b"\x02" + b"\0" * 7 + b"[]"]
)
def test_damaged_headers_are_named(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(UserError, match="a is damaged"):
        SavedTensors([tmp_path / "a"])


def test_dtypes_that_cannot_be_stored_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"w is torch\.complex64"):
        write_tensors(tmp_path / "a", {"w": whole(torch.zeros(2, dtype=torch.complex64))}, {})


MEASURE = """
import json, resource, sys, torch
from pathlib import Path
from torch import nn
from opensora.checkpoint.load import load_strictly, open_checkpoint
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
width, count = int(sys.argv[2]), int(sys.argv[3])
with torch.device("meta"):
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
small = open_checkpoint(sys.argv[1]).tensors("model")
small.region(next(iter(small)), (0, 0), (1, 1)).clone()
before = peak()
model.to_empty(device="cpu")
load_strictly(model, small, "x")
assert model[count - 1].weight[3, 5] == count - 1
print(json.dumps([peak() - before, sum(p.numel() * 4 for p in model.parameters())]))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("width", "count"), [(2048, 16), (16384, 1)])
def test_loading_takes_little_memory_beside_the_model(tmp_path, repo_root, width, count):
    """256 MB of many tensors, and a single tensor of 1 GB: the peak is the model and at most a fifth."""
    from opensora.checkpoint.load import save_checkpoint

    tensors = {f"{i}.weight": torch.full((1, 1), float(i)).expand(width, width) for i in range(count)}
    path = save_checkpoint(tmp_path / "c", {"model": tensors}, state={}, manifest={})
    command = [sys.executable, "-c", MEASURE, str(path), str(width), str(count)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, size = json.loads(done.stdout)
    assert peak < 1.2 * size + 64e6 * (count > 1), f"{peak / 1e6:.0f} MB for {size / 1e6:.0f} MB"
