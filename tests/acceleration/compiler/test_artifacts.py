"""Saved programs: found by a process that has none, refused by one that they do not fit. And the command that deletes a cache."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from opensora.acceleration.compiler import compile, load_compiled, load_pipe, save_compiled, save_pipe
from opensora.acceleration.compiler.clear_cache import clear_cache, main
from opensora.utils.errors import UserError
from tests.acceleration.compiler.toys import toy

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """No programs in this process, and an empty folder for its cache."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.nightly
@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not hasattr(torch.compiler, "save_cache_artifacts"), reason="PyTorch 2.6 cannot save programs")
@torch.no_grad()
def test_saved_programs_are_found_by_a_fresh_cache(tmp_path, monkeypatch):
    module, x = compile(toy()), torch.randn(2, 3, 16, 16)
    expected = module(x)
    folder = save_compiled(tmp_path / "saved", module)
    header = json.loads((folder / "header.json").read_text())
    assert header["torch"] == torch.__version__
    assert header["modules"][0]["class"] == "Toy"

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    again = compile(toy())
    assert load_compiled(folder, again) == header
    misses = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
    torch.testing.assert_close(again(x), expected, atol=0, rtol=0)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] == misses

    pipe = SimpleNamespace(unet=again)  # by OneDiff's names
    with pytest.raises(UserError, match="holds compiled programs already"):
        save_pipe(pipe, folder, overwrite=False)
    save_pipe(pipe, tmp_path / "pipe")
    load_pipe(pipe, tmp_path / "pipe")

    with pytest.raises(UserError, match=r"options of Toy: saved with .*'dynamic': None.*, here .*'dynamic': True"):
        load_compiled(folder, compile(toy(), options={"dynamic": True}))
    wider = toy()
    wider.fc1 = torch.nn.Linear(8, 16, bias=False)
    with pytest.raises(UserError, match="architecture of Toy"):
        load_compiled(folder, compile(wider))
    with pytest.raises(UserError, match="has no programs for Linear"):
        load_compiled(folder, compile(torch.nn.Linear(1, 1)))
    check_refusals(folder, header)


def check_refusals(folder, header) -> None:
    """What is wrong with the files themselves."""
    (folder / "header.json").write_text(json.dumps({**header, "torch": "1.0", "device": "another"}))
    with pytest.raises(UserError, match=r"torch: saved with 1.0, here .*; device: saved with another"):
        load_compiled(folder)
    (folder / "header.json").write_text(json.dumps(header))
    whole = (folder / "artifacts.bin").read_bytes()
    (folder / "artifacts.bin").write_bytes(b"short")
    with pytest.raises(UserError, match=r"artifacts.bin is damaged"):
        load_compiled(folder)
    (folder / "artifacts.bin").write_bytes(whole)
    (folder / "header.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        load_compiled(folder)


def test_there_must_be_something_to_save_and_to_load(tmp_path):
    with pytest.raises(UserError, match=r"holds no compiled programs: header.json is missing"):
        load_compiled(tmp_path)
    with pytest.raises(UserError, match="Toy is not compiled"):
        save_compiled(tmp_path, toy())


def test_nothing_compiled_is_reported(tmp_path, monkeypatch):
    module = compile(toy(), backend="aot_eager")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None, raising=False)
    with pytest.raises(UserError, match="nothing compiled yet that PyTorch keeps"):
        save_compiled(tmp_path, module)


def test_clearing_the_cache(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cache"
    assert clear_cache() == (folder, 0)
    (folder / "fxgraph").mkdir(parents=True)
    (folder / "fxgraph" / "program").write_bytes(b"1234")
    (folder / "tmp0ftza5n3" / "locks").mkdir(parents=True)  # as a killed compilation leaves them
    assert clear_cache(dry_run=True) == (folder, 4)
    assert folder.exists()
    main([])
    assert not folder.exists()
    assert "MiB deleted" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["thesis.txt", "notes/a.txt", "fxgraph"])
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path, monkeypatch, name):
    file = tmp_path / "cache" / name
    file.parent.mkdir(parents=True)
    if name == "fxgraph":
        file.symlink_to(tmp_path)
    else:
        file.write_text("mine")
    (tmp_path / "cache" / "triton").mkdir()
    with pytest.raises(UserError, match=rf"is not a folder for the cache alone: it holds {name.partition('/')[0]}"):
        clear_cache()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path / "cache")
    with pytest.raises(UserError, match="is not a folder for the cache alone"):
        clear_cache()
    assert file.exists()
    assert (tmp_path / "cache" / "triton").exists()


@pytest.mark.nightly
@pytest.mark.slow
@needs_compiler
@torch.no_grad()
def test_a_cache_alone_is_deleted_with_its_folder(tmp_path):
    torch.compile(lambda x: x.cos() * 4.25, dynamic=True)(torch.randn(50))  # a kernel that no other test has loaded
    assert list((tmp_path / "cache").rglob("*.so"))
    assert clear_cache()[1] > 1000
    assert not (tmp_path / "cache").exists()
