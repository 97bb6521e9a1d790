"""Saving while training continues: a copy is written, errors are raised, old checkpoints go, a crash at any moment is survived."""

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.checkpoint import save as ckpt_write
from opensora.checkpoint import tensors as ckpt_files
from opensora.checkpoint.load import complete_checkpoints, latest_checkpoint, open_checkpoint, save_checkpoint
from opensora.checkpoint.rotation import clear_leftovers, remove_old
from opensora.config.load import to_dict
from opensora.config.schema import LoopConfig, TrainConfig
from opensora.training import saver as saving
from opensora.training.loop import resumed_checkpoint
from opensora.training.run import RunState
from opensora.training.saver import Saver
from opensora.utils.errors import UserError
from tests.forks import forked

WORLD = World(0, 1, torch.device("cpu"))


def saver_of(run: Path, **settings) -> Saver:
    run.mkdir(parents=True, exist_ok=True)
    return Saver(run, WORLD, LoopConfig(**settings), {"model": "toy", "config": {"lr": 1}})


def parts(value: float, size: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), value)}, "optimizer": {"w/exp_avg": torch.full((size,), -value)}}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


@pytest.mark.parametrize("ckpt_async", [True, False])
def test_what_is_saved_is_what_was_there_when_it_was_called(tmp_path, ckpt_async):
    saver, own = saver_of(tmp_path, ckpt_async=ckpt_async), parts(1.0, size=500_000)
    for step in (1, 2, 3):
        own["model"]["w"].fill_(step)
        saver.save(RunState("d", 1, step=step), own)
        own["model"]["w"].fill_(-1)
    saver.wait()
    for step, path in enumerate(complete_checkpoints(tmp_path), start=1):
        opened = open_checkpoint(path, check="checksum")
        assert opened.tensors("model")["w"].unique().tolist() == [step]
        assert opened.state["step"] == opened.manifest["step"] == step
    assert names(tmp_path) == [f"epoch0-global_step{step}" for step in (1, 2, 3)]


def test_all_is_on_the_disk_before_a_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """Else a power cut leaves a folder that looks complete, whose files are empty."""
    flushed, at_rename = set(), {}
    sync, rename = os.fsync, Path.rename

    def fsync(file: int) -> None:
        sync(file)
        flushed.add(Path(f"/proc/self/fd/{file}").readlink())

    def noting(path: Path, target: Path) -> Path:
        if path.is_dir():
            inside = (path, *path.rglob("*"))
            at_rename[Path(target).name] = [str(each.relative_to(path)) for each in inside if each not in flushed]
            assert len(inside) > 6  # two folders, two files of tensors, state, manifest
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", noting)
    saver = saver_of(tmp_path.resolve(), ckpt_async=False)
    saver.save(RunState("d", 1, step=1), parts(1.0))
    assert at_rename == {"epoch0-global_step1": []}
    flushed.clear()
    saver.save(RunState("d", 1, step=2), parts(2.0))
    assert tmp_path.resolve() in flushed  # the name itself


def test_the_memory_for_copies_is_used_again(tmp_path):
    saver, own = saver_of(tmp_path), parts(1.0)
    saver.save(RunState("d", 1, step=1), own)
    saver.wait()
    first = {key: buffer.data_ptr() for key, buffer in saver._buffers.items()}
    saver.save(RunState("d", 1, step=2), {"model": own["model"]})
    saver.wait()
    assert {key: buffer.data_ptr() for key, buffer in saver._buffers.items()} == {
        key: pointer for key, pointer in first.items() if key[0] == "model"
    }


def test_the_loop_goes_on_while_the_disk_is_slow(tmp_path, monkeypatch):
    """The writer waits at its first flush until the loop says go: `save` has returned by then, and the next one waits."""
    go, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go.wait(60), sync(file)))
    saver = saver_of(tmp_path)
    saver.save(RunState("d", 1, step=1), parts(1.0))
    assert complete_checkpoints(tmp_path) == []
    go.set()
    saver.save(RunState("d", 1, step=2), parts(2.0))
    assert "epoch0-global_step1" in names(tmp_path)
    saver.wait()


@pytest.mark.parametrize("ckpt_async", [True, False])
def test_a_writer_that_fails_is_heard(tmp_path, ckpt_async):
    run = tmp_path / "run"
    saver = saver_of(run, ckpt_async=ckpt_async)
    shutil.rmtree(run)
    run.write_text("no folder any more")

    def save() -> None:
        saver.save(RunState("d", 1, step=1), parts(1.0))
        saver.wait()

    with pytest.raises(UserError, match=r"a checkpoint could not be written to .*run: "):
        save()
    run.unlink()
    saver.save(RunState("d", 1, step=2), parts(2.0))  # the error was raised once
    saver.wait()
    assert names(run) == ["epoch0-global_step2"]


def test_a_disk_that_was_full_for_a_moment_costs_one_checkpoint(tmp_path, monkeypatch, caplog):
    saver, write = saver_of(tmp_path, ckpt_async=True), ckpt_files.write_tensors

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ckpt_write, "write_tensors", full)
    saver.save(RunState("d", 1, step=1), parts(1.0))
    saver._thread.join()
    assert "epoch0-global_step1 could not be written" in caplog.text  # at once, not when the next one is due
    monkeypatch.setattr(ckpt_write, "write_tensors", write)
    saver.save(RunState("d", 1, step=2), parts(2.0))
    assert names(tmp_path) == ["epoch0-global_step2"]  # complete on return
    monkeypatch.setattr(ckpt_write, "write_tensors", full)
    saver.save(RunState("d", 1, step=3), parts(3.0))
    with pytest.raises(UserError, match="No space left"):  # it is still full
        saver.save(RunState("d", 1, step=4), parts(4.0))
    assert names(tmp_path) == ["epoch0-global_step2"]


def test_every_file_says_where_it_comes_from(tmp_path):
    from safetensors import safe_open

    saver = Saver(tmp_path, WORLD, LoopConfig(), {"model": "toy", "config": {"lr": 1}, "git_commit": "abc"})
    saver.save(RunState("d", 1, step=5), parts(1.0))
    saver.wait()
    with safe_open(tmp_path / "epoch0-global_step5" / "model" / "model.safetensors", "pt") as file:
        header = file.metadata()
    assert (header["model"], header["step"], header["part"], header["git_commit"]) == ("toy", "5", "model", "abc")
    manifest = open_checkpoint(tmp_path / "epoch0-global_step5").manifest
    assert header["config_hash"] == manifest["config_hash"]
    assert manifest["config"] == {"lr": 1}


def test_a_changed_file_is_found_when_asked(tmp_path):
    saver = saver_of(tmp_path)
    saver.save(RunState("d", 1, step=1), parts(1.0))
    saver.wait()
    path = tmp_path / "epoch0-global_step1"
    file = path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    open_checkpoint(path)
    with pytest.raises(UserError, match=r"model/model\.safetensors \(its content changed\)"):
        open_checkpoint(path, check="checksum")


class TestRotation:
    def save_steps(self, run: Path, steps, **settings) -> list[str]:
        saver = saver_of(run, **settings)
        for step in steps:
            saver.save(RunState("d", 1, step=step), parts(float(step)))
        saver.wait()
        return [path.name.rpartition("step")[2] for path in complete_checkpoints(run)]

    def test_what_cannot_be_deleted_stays_and_ends_no_run(self, tmp_path, monkeypatch, caplog):
        delete = shutil.rmtree

        def protected(path: Path, *args: object, **kwargs: object) -> None:
            if "step10" in Path(path).name:
                raise PermissionError(errno.EACCES, "Permission denied")
            delete(path, *args, **kwargs)

        monkeypatch.setattr(shutil, "rmtree", protected)
        assert self.save_steps(tmp_path, range(10, 70, 10), keep_last_n=2) == ["10", "50", "60"]
        assert caplog.text.count("epoch0-global_step10 cannot be deleted (") == 1
        half = tmp_path / ".epoch0-global_step10.partial-x"
        half.mkdir()
        assert self.save_steps(tmp_path, [70], keep_last_n=2) == ["10", "60", "70"]
        assert "step10.partial-x, left by an interrupted run, cannot be deleted" in caplog.text

    def test_the_newest_and_the_milestones_stay(self, tmp_path):
        assert self.save_steps(tmp_path / "all", range(10, 70, 10)) == ["10", "20", "30", "40", "50", "60"]
        assert self.save_steps(tmp_path / "n", range(10, 70, 10), keep_last_n=2) == ["50", "60"]
        kept = self.save_steps(tmp_path / "m", range(10, 70, 10), keep_last_n=1, keep_every_m=30, ckpt_every=10)
        assert kept == ["30", "60"]
        assert names(tmp_path / "m") == ["epoch0-global_step30", "epoch0-global_step60"]

    def test_only_what_a_run_made_is_deleted(self, tmp_path):
        self.save_steps(tmp_path, [1])
        (tmp_path / "epoch0-global_step1").rename(tmp_path / "the good one")
        (tmp_path / "epoch0-global_step2").mkdir()  # of somebody else: no manifest
        (tmp_path / "notes.txt").write_text("mine")
        self.save_steps(tmp_path, [3, 4, 5], keep_last_n=1)
        assert names(tmp_path) == ["epoch0-global_step2", "epoch0-global_step5", "notes.txt", "the good one"]

    def damage(self, path: Path) -> None:
        file = path / "model" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-3])

    def test_a_damaged_one_is_no_reason_to_delete_the_one_just_written(self, tmp_path, caplog):
        """It was passed over by a resume; what was written after it has an earlier step, and is the newest that is whole."""
        assert self.save_steps(tmp_path, [400, 500]) == ["400", "500"]
        self.damage(tmp_path / "epoch0-global_step500")
        assert latest_checkpoint(tmp_path) == tmp_path / "epoch0-global_step400"
        assert self.save_steps(tmp_path, [450], keep_last_n=1) == ["450", "500"]
        assert latest_checkpoint(tmp_path) == tmp_path / "epoch0-global_step450"
        assert self.save_steps(tmp_path, [475], keep_last_n=1) == ["475", "500"]
        assert caplog.text.count("neither counted nor deleted by keep_last_n") == 1
        assert self.save_steps(tmp_path, [500, 525], keep_last_n=1) == ["525"]  # its step was reached: it was replaced

    def test_damaged_ones_take_no_place_of_the_newest(self, tmp_path):
        self.save_steps(tmp_path, [1, 2, 3, 4])
        for step in (2, 4):
            self.damage(tmp_path / f"epoch0-global_step{step}")
        assert self.save_steps(tmp_path, [5], keep_last_n=2) == ["2", "3", "4", "5"]

    def test_what_only_a_checksum_tells_from_a_whole_one(self, tmp_path):
        """A run with load_check="checksum" passes over what has its sizes, and that is not seen here."""
        self.save_steps(tmp_path, [300, 400, 500])
        assert self.save_steps(tmp_path, [450], keep_last_n=2) == ["400", "450", "500"]
        assert self.save_steps(tmp_path, [510, 520], keep_last_n=2) == ["510", "520"]

    def test_those_of_an_older_version_count(self, tmp_path):
        self.save_steps(tmp_path, [1, 2, 3])
        for path in complete_checkpoints(tmp_path):
            manifest = json.loads((path / "manifest.json").read_text())
            del manifest["attempt"]
            (path / "manifest.json").write_text(json.dumps(manifest))
        assert self.save_steps(tmp_path, [4], keep_last_n=2) == ["3", "4"]

    def test_nothing_is_deleted_where_the_newest_is_not_whole(self, tmp_path):
        saver = saver_of(tmp_path)
        for step in (1, 2):
            saver.save(RunState("d", 1, step=step), parts(1.0))
        saver.wait()
        token = json.loads((tmp_path / "epoch0-global_step2" / "manifest.json").read_text())["attempt"]
        self.damage(tmp_path / "epoch0-global_step2")
        assert remove_old(tmp_path, keep_last_n=1, keep_every_m=None, token=token) == []
        assert names(tmp_path) == ["epoch0-global_step1", "epoch0-global_step2"]

    def test_nothing_is_deleted_for_a_checkpoint_that_failed(self, tmp_path):
        saver = saver_of(tmp_path, keep_last_n=1)
        saver.save(RunState("d", 1, step=1), parts(1.0))
        saver.save(RunState("d", 1, step=2), {"model": {"w": torch.zeros(1, dtype=torch.complex64)}})
        with pytest.raises(UserError, match="complex64"):
            saver.wait()
        assert names(tmp_path) == ["epoch0-global_step1"]


class TestLatest:
    def test_incomplete_ones_are_passed_over_and_told(self, tmp_path, caplog):
        saver = saver_of(tmp_path / "run")
        for step in (9, 10, 11):
            saver.save(RunState("d", 1, step=step), parts(float(step)))
        saver.wait()
        (tmp_path / "run" / "epoch0-global_step11" / "model" / "model.safetensors").write_bytes(b"cut")
        (tmp_path / "run" / ".epoch0-global_step12.partial-ab-12").mkdir()
        cfg = LoopConfig(outputs=str(tmp_path), exp_name="run", load="latest")
        assert resumed_checkpoint(cfg) == tmp_path / "run" / "epoch0-global_step10"
        assert "the writing of epoch0-global_step12 was interrupted" in caplog.text
        assert re.search(
            r"passed over: .*step11 is not a complete checkpoint: model/model.safetensors \(3 of", caplog.text
        )

    @pytest.mark.parametrize("change", [
        {"step": "eleven"}, {"step": [11]}, {"files": [1]}, {"files": None}, {"crc32": [1]}, {"config": "lr"}, b"\xff", b"[1]", b"{",
    ])  # fmt: skip
    def test_a_damaged_manifest_is_passed_over_and_told(self, tmp_path, caplog, change):
        saver = saver_of(tmp_path / "run", ckpt_async=False)
        for step in (10, 11):
            saver.save(RunState("d", 1, step=step), parts(float(step)))
        damaged = tmp_path / "run" / "epoch0-global_step11"
        file = damaged / "manifest.json"
        file.write_bytes(
            change if isinstance(change, bytes) else json.dumps(json.loads(file.read_text()) | change).encode()
        )
        cfg = LoopConfig(outputs=str(tmp_path), exp_name="run", load="latest", load_check="checksum")
        assert resumed_checkpoint(cfg) == tmp_path / "run" / "epoch0-global_step10"
        assert f"passed over: {damaged}, whose manifest.json is damaged" in caplog.text
        with pytest.raises(UserError, match=r"step11/manifest.json .*Load another checkpoint"):
            open_checkpoint(damaged)

    def test_a_damaged_state_is_passed_over_and_told(self, tmp_path, caplog):
        saver = saver_of(tmp_path / "run", ckpt_async=False)
        for step in (10, 11):
            saver.save(RunState("d", 1, step=step), parts(float(step)))
        file = tmp_path / "run" / "epoch0-global_step11" / "state.json"
        file.write_text("x" * file.stat().st_size)
        assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "epoch0-global_step10"
        assert "step11/state.json is no valid JSON" in caplog.text

    @pytest.mark.parametrize(("then", "now", "message"), [(True, "block", ""), (1, "block", "was mlp:1/3, now block")])
    def test_a_resume_compares_what_older_spellings_mean(self, tmp_path, caplog, then, now, message):
        """`True` equals 1, and meant every block, while 1 meant some MLPs."""
        parts: dict = {name: {} for name in ("model", "vae", "text_encoder", "scheduler")}
        cfg = TrainConfig(**parts, grad_checkpoint=now, load=str(tmp_path / "c"))
        manifest = {"config": {**to_dict(cfg), "grad_checkpoint": then}}
        save_checkpoint(tmp_path / "c", {"model": {"w": torch.ones(1)}}, state={}, manifest=manifest)
        resumed_checkpoint(cfg)
        assert ("grad_checkpoint" in caplog.text) == bool(message)
        assert message in caplog.text

    def test_a_run_without_any_begins_and_says_so(self, tmp_path, caplog):
        cfg = LoopConfig(outputs=str(tmp_path), exp_name="run", load="latest")
        assert resumed_checkpoint(cfg) is None
        assert f"{tmp_path}/run has no complete checkpoint yet; beginning at step 0" in caplog.text

    def test_what_contradicts_itself(self):
        problems = "\n".join(LoopConfig(load="latest").problems() + LoopConfig(keep_every_m=5).problems())
        assert "load='latest' needs exp_name" in problems
        assert "keep_every_m=5 has no effect without keep_last_n" in problems
        assert "not a multiple of ckpt_every=250" in problems
        assert "load_check='checksum' has no effect" in LoopConfig(load_check="checksum").problems()[0]

    def test_leftovers_go_and_what_was_being_replaced_comes_back(self, tmp_path):
        saver = saver_of(tmp_path)
        for step in (1, 2):
            saver.save(RunState("d", 1, step=step), parts(1.0))
        saver.wait()
        (tmp_path / "epoch0-global_step1").rename(tmp_path / ".epoch0-global_step1.old-ab-1")
        for name in (
            ".epoch0-global_step2.old-ab-2",
            ".epoch0-global_step7.partial-x-7",
            ".epoch0-global_step0.removed-x",
            ".mine",
        ):
            (tmp_path / name / "inner").mkdir(parents=True)
        clear_leftovers(tmp_path)
        assert names(tmp_path) == [".mine", "epoch0-global_step1", "epoch0-global_step2"]


# ---------------------------------------------------------------------------------- crashes
MOMENTS = ("fsync", "rename", "rmdir", "unlink")  # of `os`: before each of these calls the process may die


def save_and_die(run: Path, moment: int) -> None:
    """Save three checkpoints, keeping two, and die before the `moment`-th call; exit code 0 when there are fewer calls."""
    count = 0

    def dying(call):
        def called(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return called

    for name in MOMENTS:
        setattr(os, name, dying(getattr(os, name)))
    saver = saver_of(run, keep_last_n=2)
    for step in (2, 3, 4):
        saver.save(RunState("d", 1, step=step), parts(float(step)))
    saver.wait()


def check_survivors(run: Path, oldest: int) -> int:
    """What is found after a crash is complete, unchanged, and not older than it must be; the newest's step."""
    for path in complete_checkpoints(run):
        opened = open_checkpoint(path, check="checksum")
        assert opened.tensors("model")["w"].unique().tolist() == [opened.state["step"]]
    latest = latest_checkpoint(run)
    assert latest is not None
    step = json.loads((latest / "state.json").read_text())["step"]
    assert step >= oldest
    return step


@pytest.mark.nightly
@pytest.mark.slow
def test_a_crash_before_any_call_that_changes_the_disk(tmp_path):
    context, moment, code = multiprocessing.get_context("fork"), 0, -9
    while code:
        moment += 1
        run = tmp_path / str(moment)
        first = saver_of(run)
        first.save(RunState("d", 1, step=1), parts(1.0))
        first.wait()
        process = context.Process(target=forked, args=(save_and_die, run, moment))
        process.start()
        process.join()
        code = process.exitcode
        assert code in (0, -9)
        step = check_survivors(run, oldest=1)
        saver = saver_of(run, keep_last_n=2)  # the next start puts the folder in order
        saver.save(RunState("d", 1, step=step + 1), parts(step + 1.0))
        saver.wait()
        assert check_survivors(run, oldest=step + 1) == step + 1
        assert not [name for name in names(run) if name.startswith(".")]
        assert len(complete_checkpoints(run)) <= 3
    assert moment > 30  # the hooks are where the work is done


def save_for_ever(run: Path) -> None:
    latest = latest_checkpoint(run)
    step = int(latest.name.rpartition("step")[2]) if latest else 0
    saver = saver_of(run, keep_last_n=2)
    while True:
        step += 1
        saver.save(RunState("d", 1, step=step), parts(float(step), size=300_000))


@pytest.mark.nightly
@pytest.mark.slow
def test_kill_9_at_twenty_random_moments(tmp_path):
    """Each process goes on where the one before was killed, as a job that is started again does."""
    context, rng, last = multiprocessing.get_context("fork"), random.Random(7), 0
    for _ in range(20):
        process = context.Process(target=forked, args=(save_for_ever, tmp_path))
        process.start()
        time.sleep(rng.uniform(0.05, 0.4))
        while not complete_checkpoints(tmp_path):  # until there is a first one
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = check_survivors(tmp_path, oldest=last)
        assert len(complete_checkpoints(tmp_path)) <= 3
    assert last > 5


@pytest.mark.multiprocess
def test_a_folder_that_is_not_shared_is_told_before_the_first_step(tmp_path, spawn):
    spawn(make_savers, 2, tmp_path)
    assert not list(tmp_path.rglob(".shared-*"))


def make_savers(rank: int, world_size: int, folder: Path) -> None:
    world, run, other = World(rank, world_size, torch.device("cpu")), folder / "run", folder / "of another node"
    for path in (run, other):
        path.mkdir(exist_ok=True)
    Saver(run, world, LoopConfig(), {})  # a shared one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "SEEN_S", 0.3)
        with pytest.raises(UserError, match=r"process 1 on .* does not see .*outputs=.* must be a folder that all"):
            Saver(other if rank else run, world, LoopConfig(), {})
        if rank:  # which root cannot be shown otherwise
            patch.setattr(Path, "touch", refuse)
        with pytest.raises(UserError, match=r"process 1 on .* cannot write to .*read-only.*must be a folder that all"):
            Saver(run, world, LoopConfig(), {})


def refuse(path: Path) -> None:
    raise PermissionError(f"{path.name}: read-only")
