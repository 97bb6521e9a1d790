"""Saved programs: found by a process that has none, refused by one that they do not fit. And the command that deletes a cache."""

import json
import shutil

import pytest
import torch

from opensora.acceleration.compiler import cache_counters, compile, load_compiled, save_compiled
from opensora.acceleration.compiler.clear_cache import clear_cache, main
from opensora.utils.errors import UserError
from tests.acceleration.compiler.toys import toy

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """No programs in this process, and an empty folder for its cache."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not hasattr(torch.compiler, "save_cache_artifacts"), reason="PyTorch 2.6 cannot save programs")
@torch.no_grad()
def test_saved_programs_are_found_by_a_fresh_cache(tmp_path, monkeypatch):
    module, x = compile(toy()), torch.randn(2, 3, 16, 16)
    with pytest.raises(UserError, match="nothing compiled yet; programs are made by the first call"):
        save_compiled(tmp_path / "saved", module)
    expected = module(x)
    folder = save_compiled(tmp_path / "saved", module)
    header = json.loads((folder / "header.json").read_text())
    assert header["torch"] == torch.__version__
    assert header["modules"][0]["class"] == "Toy"
    assert json.loads(header["modules"][0]["sizes"][0]) == [[2, 3, 16, 16]]

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    again = compile(toy())
    assert load_compiled(folder, again) == header
    before = cache_counters()
    torch.testing.assert_close(again(x), expected, atol=0, rtol=0)
    after = cache_counters()
    assert after.hits > before.hits
    assert after.misses == before.misses

    with pytest.raises(UserError, match=r"options of Toy: saved with .*'dynamic': None.*, here .*'dynamic': True"):
        load_compiled(folder, compile(toy(), options={"dynamic": True}))
    wider = toy()
    wider.fc1 = torch.nn.Linear(8, 16, bias=False)
    with pytest.raises(UserError, match="architecture of Toy"):
        load_compiled(folder, compile(wider))
    with pytest.raises(UserError, match="no programs for Linear, but for Toy"):
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
    with pytest.raises(UserError, match=r"artifacts.bin is damaged: its checksum differs"):
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


def test_clearing_the_cache(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cache"
    (folder / "fxgraph").mkdir(parents=True)
    (folder / "fxgraph" / "program").write_bytes(b"1234")
    assert clear_cache(dry_run=True) == (folder, 4, [])
    assert folder.exists()
    main([])
    assert not folder.exists()
    assert "MiB deleted" in capsys.readouterr().out
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is no folder of its own"):
        clear_cache()


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
def test_clearing_leaves_what_is_not_the_caches(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cache"  # such as /scratch/me, in which somebody has other things
    others = [
        "thesis.txt",
        "ab/notes.txt",
        "cache/model.bin",
        "triton/setup.py",
        "triton/python/a.py",
        "dynamo/db",
        "tmp/x",
    ]
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "link").symlink_to(tmp_path)
    kernel = folder / "triton" / "0" / "RVGIFLQAXRJOLLXKIQ2ENPUFSXGE6CM4OXDLWS5TWEB3FM4HQYTA"
    kernel.mkdir(parents=True)
    (kernel / "kernel.cubin").write_bytes(b"1")
    torch.compile(lambda x: x.sin() * 3.25)(torch.randn(50))  # a kernel that no other test has loaded
    assert list(folder.rglob("*.so"))
    before = {path for path in folder.rglob("*") if path.is_file()}
    main(["--dry-run"])
    assert {path for path in folder.rglob("*") if path.is_file()} == before
    capsys.readouterr()
    main([])
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(others)
    assert (folder / "link").is_symlink()
    said = capsys.readouterr().out
    for name in ("thesis.txt", "ab", "cache", "triton/setup.py", "triton/python", "dynamo", "tmp", "link"):
        assert f"left alone, for PyTorch does not make it: {folder / name}\n" in said


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
def test_a_cache_alone_is_deleted_with_its_folder(tmp_path):
    torch.compile(lambda x: x.cos() * 4.25, dynamic=True)(torch.randn(50))  # a kernel that no other test has loaded
    assert list((tmp_path / "cache").rglob("*.so"))
    assert clear_cache().size > 1000
    assert not (tmp_path / "cache").exists()


@needs_compiler
@torch.no_grad()
def test_frozen_programs_that_pytorch_does_not_keep_are_told(tmp_path, monkeypatch):
    module = compile(toy(), options={"mode": "freezing"})
    module._compiled_call_impl.compiled = module._call_impl  # what a CPU's program says when it is saved
    module(torch.randn(1, 3, 8, 8))
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None, raising=False)
    with pytest.raises(UserError, match=r"keeps no program with frozen weights .* Compile without freezing"):
        save_compiled(tmp_path, module)
