"""Files recognised by content, damage named, code refused, nothing overwritten."""

import argparse
import json
import os
import pickle
import shlex
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from opensora.checkpoint.weight_files import kind_of, read_file, write_file
from opensora.utils.errors import UserError


@pytest.fixture
def state():
    return {"a.w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def assert_same(read, state):
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


class Evil:
    """Unpickled by a careless reader, it leaves a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.bin", "w", "w.zip"])
@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy"])
def test_the_name_says_nothing(tmp_path, state, name, form):
    if form == "safetensors":
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=form == "zip")
    assert kind_of(tmp_path / name) == ("safetensors" if form == "safetensors" else "pickle")
    assert_same(read_file(tmp_path / name), state)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"ema": s, "model": {"x": torch.zeros(1)}, "opt": {"state": {}}, "step": 7},
        lambda s: {"state_dict": s, "epoch": 1, "optimizer": {"param_groups": [{"lr": 0.1}]}},
        lambda s: {"state_dict_ema": s, "state_dict": {"x": torch.zeros(1)}},
        lambda s: {"model": {"module": OrderedDict(s)}},
        lambda s: {"module": s, "ema": {}, "global_steps": torch.tensor(3)},
        lambda s: {"ema": {"state_dict": {"module": s, "decay": 0.9}}},
    ],
)
def test_wrappers_are_opened(tmp_path, state, wrap):
    torch.save(wrap(state), tmp_path / "w.pt")
    assert_same(read_file(tmp_path / "w.pt"), state)


def test_what_was_left_aside_is_said(tmp_path, state, caplog):
    torch.save({"ema": state, "model": state, "opt": {}}, tmp_path / "w.pt")
    with caplog.at_level("INFO"):
        read_file(tmp_path / "w.pt")
    assert "taking 'ema'; not used: model, opt" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "no dictionary of tensors alone, but: list"),
        ({}, "no dictionary of tensors alone, but: nothing"),
        ({"model": {"w": torch.zeros(1), "lr": 0.1}}, r"alone, but: lr \(float\)"),
        ({f"k{i}": i for i in range(9)}, "and 3 more"),
        ({"a": torch.zeros(1), "b": torch.eye(2).to_sparse()}, r"alone, but: b \(torch.sparse_coo, cpu\)"),
        ({"w": torch.empty(2, device="meta")}, r"alone, but: w \(torch.strided, meta\)"),
        (
            lambda: {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
            r"alone, but: w \(torch.qint8\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # quantised tensors are deprecated, and still in files
def test_other_contents_are_named(tmp_path, content, message):
    torch.save(content() if callable(content) else content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=message):
        read_file(tmp_path / "w.pt")


def write_index(folder, weight_map, name="w.bin.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder / name


@pytest.mark.parametrize("container", ["zip", "legacy", "plain pickle", "next to the weights", "shard"])
def test_a_pickle_with_code_is_refused_in_every_container(tmp_path, container):
    content = {"w": torch.zeros(1), "x": Evil(tmp_path / "touched")}
    path = tmp_path / "w.bin"
    if container == "plain pickle":
        path.write_bytes(pickle.dumps({"x": content["x"]}, protocol=2))
    elif container == "next to the weights":
        torch.save({"model": {"w": torch.zeros(1)}, "args": content["x"]}, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container != "legacy")
    target = write_index(tmp_path, {"w": "w.bin", "x": "w.bin"}) if container == "shard" else path
    with pytest.raises(UserError, match=r"w\.bin is refused: it holds \w+\.system"):
        read_file(target)
    assert not (tmp_path / "touched").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_refusal_tells_a_command_that_helps(tmp_path, state):
    path = tmp_path / "it's trusted.pt"
    torch.save({"model": state, "opt": {}, "args": argparse.Namespace(lr=1)}, path)
    with pytest.raises(UserError, match=r"it holds argparse\.Namespace") as refused:
        read_file(path)
    command = str(refused.value).splitlines()[-1].strip()
    program, *arguments = shlex.split(command)
    assert program == "python"
    subprocess.run([sys.executable, *arguments], check=True)
    assert_same(read_file(tmp_path / "it's trusted.weights.pt"), state)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"garbage" * 20, "neither safetensors nor"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"PK\x03\x04 cut off", "seems damaged"),
        (b"\x80\x02garbage", "cannot be read|refused"),
        ((10**6).to_bytes(8, "little") + b'{"w": 1}', "seems damaged"),
    ],
)
def test_what_is_no_weights_is_named(tmp_path, content, message):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_file(tmp_path / "w.pt")
    assert str(tmp_path / "w.pt") in str(error.value)


@pytest.mark.parametrize("form", ["safetensors", "zip"])
def test_a_file_that_was_cut_off_is_named(tmp_path, form):
    state = {"w": torch.zeros(1000)}
    save_file(state, tmp_path / "w") if form == "safetensors" else torch.save(state, tmp_path / "w")
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:-2000])
    with pytest.raises(UserError, match="seems damaged"):
        read_file(tmp_path / "w")


def test_an_archive_of_something_else_is_no_pickle(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("clip.mp4", b"")
    assert kind_of(tmp_path / "w.pt") is None


class TestShards:
    def test_all_are_read_whatever_their_form(self, tmp_path, state):
        save_file({"a.w": state["a.w"]}, tmp_path / "one")
        torch.save({"b": state["b"]}, tmp_path / "two.bin")
        assert_same(read_file(write_index(tmp_path, {"a.w": "one", "b": "two.bin"})), state)

    def test_one_is_missing(self, tmp_path, state):
        save_file(state, tmp_path / "one")
        with pytest.raises(UserError, match="needs 2 files; missing: two"):
            read_file(write_index(tmp_path, {"a.w": "one", "c": "two"}))

    def test_index_and_shards_disagree(self, tmp_path, state):
        save_file(state, tmp_path / "one")
        with pytest.raises(UserError, match="1 tensors are in none of them, such as c"):
            read_file(write_index(tmp_path, {"a.w": "one", "c": "one"}))

    def test_a_tensor_twice(self, tmp_path, state):
        for name in ("one", "two"):
            save_file(state, tmp_path / name)
        with pytest.raises(UserError, match=r"a\.w is in two and in another shard"):
            read_file(write_index(tmp_path, {"a.w": "one", "b": "two"}))

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("name", ["../w", "a/../../w", "/etc/w", "..\\w", "C:\\w", ""])
    def test_a_name_outside_the_folder_is_refused(self, tmp_path, state, name, inside):
        folder = tmp_path / "model"
        folder.mkdir()
        save_file(state, tmp_path / "w")
        save_file(state, folder / "good")
        weight_map = {"b": "good", "a.w": name} if inside else {"a.w": name, "b": name}
        with pytest.raises(UserError, match=r"is refused: its shard .* is not inside the folder"):
            read_file(write_index(folder, weight_map))


class TestWriting:
    def test_format_header_and_round_trip(self, tmp_path, state):
        state["count"] = torch.tensor(3)
        size = write_file(
            state, tmp_path / "new" / "w", dtype="fp32", header={"model": "M", "config": {"a": 1}, "x": None}
        )
        assert size == (tmp_path / "new" / "w").stat().st_size
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["w"]
        read = read_file(tmp_path / "new" / "w")
        assert read["b"].dtype == torch.float32
        assert read["count"].dtype == torch.int64
        with safe_open(tmp_path / "new" / "w", "pt") as file:
            assert file.metadata() == {"format": "pt", "model": "M", "config": '{"a": 1}'}

    def test_shared_memory_is_no_obstacle(self, tmp_path):
        w = torch.ones(3)
        write_file({"a": w, "b": w, "c": w[:2]}, tmp_path / "w", dtype="fp32", header={})
        assert read_file(tmp_path / "w").keys() == {"a", "b", "c"}

    def test_nothing_is_overwritten_or_left_half_done(self, tmp_path, state):
        (tmp_path / "w").write_text("precious")
        with pytest.raises(UserError, match="is there already"):
            write_file(state, tmp_path / "w", dtype="fp16", header={})
        assert (tmp_path / "w").read_text() == "precious"
        with pytest.raises(TypeError):  # in the middle of writing
            write_file(state, tmp_path / "v", dtype="fp16", header={1: "a name that is no text"})
        assert [path.name for path in tmp_path.iterdir()] == ["w"]
