"""Run folders never clash; a resume that would mean something else is refused."""

import errno
import fcntl
import json
import multiprocessing
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from opensora.config.load import TrainConfig, changed_settings, parse_config
from opensora.config.schema import LoopConfig
from opensora.datasets.buckets.bucket import Buckets
from opensora.datasets.dataloader import build_sampler
from opensora.datasets.sampler import DataPosition
from opensora.training.run import (
    RunState,
    check_run_folder,
    check_wandb,
    class_list,
    due,
    effective_batch,
    make_run_folder,
    parameter_table,
    seek,
    what_to_do_next,
)
from opensora.utils import environment as environment_module
from opensora.utils.environment import git_changes
from opensora.utils.errors import UserError
from tests.forks import forked


def test_numbers_count_on_and_never_reuse_what_is_there(tmp_path):
    make = lambda: make_run_folder(str(tmp_path / "o"), None, "STDiT-XL/2", {})  # noqa: E731
    names = [make().name for _ in range(3)]
    assert names == ["000-STDiT-XL-2", "001-STDiT-XL-2", "002-STDiT-XL-2"]
    shutil.rmtree(tmp_path / "o" / names[0])
    assert make().name == "003-STDiT-XL-2"


def test_a_named_run_is_never_overwritten(tmp_path):
    make_run_folder(str(tmp_path), "mine", "m", {"lr": 1})
    with pytest.raises(UserError, match="mine is there already"):
        make_run_folder(str(tmp_path), "mine", "m", {})
    assert (tmp_path / "mine" / "config.json").read_text().strip() == '{\n "lr": 1\n}'


def test_a_run_that_cannot_be_written_is_refused_before_it_begins(tmp_path):
    make_run_folder(str(tmp_path), "mine", "m", {})
    with pytest.raises(UserError, match="mine is there already"):
        check_run_folder(str(tmp_path), "mine")
    assert check_run_folder(str(tmp_path), "mine", resume=True) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"outputs=.*file: no files can be written there .*Choose another --outputs"):
        check_run_folder(str(tmp_path / "file"), None)
    for name in ("../other", "/other"):
        with pytest.raises(UserError, match="names a folder inside of outputs"):
            check_run_folder(str(tmp_path), name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_two_runs_never_write_into_one_folder(tmp_path):
    """As when a queue starts a job again whose first start still runs: it must not take that one's half-written checkpoint for a leftover."""
    outputs, fork = str(tmp_path), multiprocessing.get_context("fork")
    begun = fork.Event()
    other = fork.Process(target=forked, args=(hold, outputs, begun))
    other.start()
    assert begun.wait(20)
    where = re.escape(f"mine is in use by another run (process {other.pid} on {socket.gethostname()})")
    for _ in range(2):  # a refused attempt releases nothing
        with pytest.raises(UserError, match=where):
            check_run_folder(outputs, "mine", resume=True)
    assert len(list((tmp_path / "mine").glob("config*.json"))) == 1
    other.kill()  # whatever ends it
    other.join()
    check_run_folder(outputs, "mine", resume=True)
    make_run_folder(outputs, "mine", "m", {}, resume=True)
    child = fork.Process(target=forked, args=(refused, outputs))
    child.start()
    child.join()
    assert child.exitcode == 0
    make_run_folder(
        outputs, "mine", "m", {}, resume=True
    )  # one process may have several starts of it, one after another


def hold(outputs: str, begun: Event) -> None:
    make_run_folder(outputs, "mine", "m", {})
    begun.set()
    time.sleep(60)


def refused(outputs: str) -> None:
    """In a child, which must have none of its parent's locks: a loader's worker may outlive it."""
    with pytest.raises(UserError, match="in use by another run"):
        check_run_folder(outputs, "mine", resume=True)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    make_run_folder(str(tmp_path), "mine", "m", {})
    assert "mine: no locks here (No locks available), so nothing keeps a second run out" in caplog.text


def test_a_resume_reports_which_settings_changed():
    before = {"lr": 1e-4, "size": [1, 2], "scheduler": {"type": "iddpm", "guidance": {}}, "load": None, "gone": 1}
    now = {"lr": 1e-3, "size": (1, 2), "scheduler": {"type": "iddpm", "prediction": "v"}, "load": "x", "new": 2}
    assert changed_settings(before, now) == [
        "lr was 0.0001, now 0.001",
        "scheduler.prediction was not set, now v",
    ]
    assert changed_settings(before, {"scheduler": None}) == ["scheduler.type was iddpm, now not set"]
    assert changed_settings({}, now) == []
    assert changed_settings({"part": {"levels": True}}, {"part": {"levels": 1}}) == ["part.levels was True, now 1"]
    assert changed_settings({"part": {"scale": 1}}, {"part": {"scale": 1.0}}) == []


AHEAD = {"step": 0, "epoch": 0, "rest": 6, "length": 6, "accumulation": 1}


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        ({"step": "7"}, "step"),
        ({"step": -1, "epoch": None}, "step, epoch"),
        ({"micro_batch": True}, "micro_batch"),
        ({"epoch_start": 1.0, "steps_before": -1}, "epoch_start, steps_before"),
        ({"world": 0}, "world"),
        ({"segments": [3]}, "segments or ahead"),
        ({"segments": [["a", 2]]}, "segments or ahead"),
        ({"ahead": {"step": 0}}, "segments or ahead"),
        ({"ahead": {**AHEAD, "rest": None}}, "segments or ahead"),
    ],
)
def test_a_position_edited_by_hand_is_refused(edit, wrong):
    saved = {"data": "abc", "global_batch": 4, "step": 7, "micro_batch": 14, "epoch": 1}
    assert RunState("abc", 4).resumed({**saved, "segments": [[2, 3]], "ahead": AHEAD}, "c").step == 7
    for read in (RunState("abc", 4).resumed, RunState("abc", 4).after):
        with pytest.raises(
            UserError, match=rf"^c: its state\.json does not hold the position of a run \({wrong}\)\. Load"
        ):
            read({**saved, **edit}, "c")


def test_resume_refuses_other_data_and_other_batches():
    saved = {"data": "abc", "global_batch": 4, "step": 7, "micro_batch": 14, "epoch": 1}
    assert RunState("abc", 4).resumed(saved, "c").micro_batch == 14
    with pytest.raises(UserError, match=r"dataset .*was abc, now xyz.*start-from-scratch"):
        RunState("xyz", 4).resumed(saved, "c")
    with pytest.raises(UserError, match="was 4, now 8"):
        RunState("abc", 8).resumed(saved, "c")


def test_epochs_may_differ_in_length():
    lengths = [3, 1, 4]
    state = RunState("abc", 0)
    seen = []
    for _ in range(4):
        state.advance(2, lambda epoch: lengths[epoch % 3])
        seen.append((state.step, state.micro_batch, state.epoch, state.batch_in_epoch))
    assert seen == [(1, 2, 0, 2), (2, 4, 2, 0), (3, 6, 2, 2), (4, 8, 3, 0)]


def test_other_numbers_of_ranks_are_remembered_within_an_epoch():
    saved = {**asdict(RunState("abc", 0, world=4)), "step": 9, "micro_batch": 13, "epoch": 1, "epoch_start": 10}
    assert RunState("abc", 0, world=4).resumed(saved, "c").segments == []
    state = RunState("abc", 0, world=2).resumed(saved, "c")
    assert (state.segments, state.batch_in_epoch, state.world) == ([(4, 3)], 3, 2)
    state.advance(2, lambda epoch: 20)
    again = RunState("abc", 0, world=1).resumed(asdict(state), "c")
    assert again.segments == [(4, 3), (2, 2)]
    again.advance(15, lambda epoch: 20)
    assert (again.epoch, again.segments) == (2, [])


def test_other_data_begin_the_next_epoch_when_asked():
    saved = {"data": "abc", "global_batch": 4, "step": 7, "micro_batch": 14, "epoch": 1, "epoch_start": 10}
    state = RunState("xyz", 8).resumed(saved, "c", other_data="next_epoch")
    assert (state.step, state.micro_batch, state.epoch, state.batch_in_epoch) == (7, 14, 2, 0)
    assert RunState("abc", 4).resumed(saved, "c", other_data="next_epoch").batch_in_epoch == 4


def test_another_order_of_batches_is_refused_inside_of_an_epoch():
    saved = {**asdict(RunState("abc", 0, plan="mixed")), "step": 9, "micro_batch": 13, "epoch": 1, "epoch_start": 10}
    assert RunState("abc", 0, plan="mixed").resumed(saved, "c").batch_in_epoch == 3
    with pytest.raises(UserError, match="the order of batches was mixed, now same"):
        RunState("abc", 0, plan="same").resumed(saved, "c")
    assert RunState("abc", 0, plan="same").resumed({**saved, "epoch_start": 13}, "c").plan == "same"
    saved.pop("plan")  # of a version that did not save it
    assert RunState("abc", 0, plan="same").resumed(saved, "c").batch_in_epoch == 3


def test_due():
    assert [due(step, 3) for step in (1, 2, 3, 6)] == [False, False, True, True]
    assert not due(3, 0)


class Clips:
    """A dataset that a sampler asks for its length, or its buckets."""

    def __init__(self, count: int, config: dict | None = None) -> None:
        self.count = count
        if config is not None:
            self.buckets = Buckets(config)
            sizes = np.array([[1 + i % 3, 32, 48] for i in range(count)], np.int64)
            self.assign = lambda epoch: self.buckets.assign(*sizes.T, seed=1, epoch=epoch)

    def __len__(self) -> int:
        return self.count


def take(dataset: Clips, state: RunState, ranks: int, batch_size: int, steps: int, accumulation: int) -> list[int]:
    """What so many processes read in so many optimizer steps, as the training scripts go on at `state`."""
    read: list[int] = []
    for rank in range(ranks):
        sampler = build_sampler(dataset, batch_size, seed=1, rank=rank, world_size=ranks)
        sampler.seek(DataPosition(state.epoch, state.batch_in_epoch, tuple(state.segments)), steps * accumulation)
        read += [key.index for batch in sampler for key in batch.keys if key.epoch == 0]
    for _ in range(steps):
        state.advance(accumulation, sampler.batches_in)
    return read


BUCKETS = {"32x48": {1: (1.0, 3), 2: (1.0, 2)}}


@pytest.mark.parametrize("config", [None, BUCKETS])
@pytest.mark.parametrize("sp_size", [1, 2])
def test_no_sample_is_lost_or_doubled_when_the_number_of_processes_changes(config, sp_size):
    """2 data-parallel processes, then 4, then 1, in the middle of an epoch; `world` counts groups that share samples."""
    dataset, buckets = Clips(48, config), config is not None
    read, saved = [], None
    for world, batch_size, steps in ((2 * sp_size, 4, 2), (4 * sp_size, 2, 1), (sp_size, 8, 2 if not buckets else 20)):
        ranks = world // sp_size
        state = RunState("d", 0 if buckets else batch_size * ranks, world=ranks)
        state = state if saved is None else state.resumed(saved, "c")
        read += take(dataset, state, ranks, batch_size, steps, accumulation=1 if buckets else 2)
        saved = json.loads(json.dumps(asdict(state)))
    counts = Counter(read)
    if buckets:
        assert counts == Counter(range(48))
    else:  # the same 8 samples a batch as one process reads
        whole = take(dataset, RunState("d", 8), 1, 8, 5, accumulation=2)
        assert counts == Counter(whole)
        assert len(whole) >= 48


END = LoopConfig(epochs=10)  # type: ignore[call-arg]
CHANGES = {
    "larger steps": (None, (2, 1), (2, 2)),
    "smaller steps": (None, (2, 2), (2, 1)),
    "fewer processes": (BUCKETS, (2, 1), (1, 1)),
    "more processes": (BUCKETS, (1, 1), (2, 1)),
    "nothing": (BUCKETS, (2, 2), (2, 2)),
}
"""Of the data, and (processes, batches of a step) before and after."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("done", [0.3, 0.5])
def test_a_run_has_its_epochs_whatever_changes_on_the_way(change, done):
    """The end is that of 10 epochs; of buckets' nearly, since they differ in length and the first counts for all."""
    config, before, after = CHANGES[change]
    dataset, totals, saved = Clips(50, config), [], None
    for ranks, accumulation in (before, after, after):  # the last is another resume, where nothing changes any more
        cfg = replace(END, accumulation_steps=accumulation)
        sampler = build_sampler(dataset, 4 // ranks, seed=1, rank=0, world_size=ranks)
        state = RunState("d", 0 if config else 4, world=ranks)
        state = state if saved is None else state.resumed(saved, "c")
        totals.append(seek(cfg, sampler, state))
        assert sum(1 for _ in sampler) == (totals[-1] - state.step) * accumulation
        until = int(totals[0] * done) if saved is None else state.step + 1
        while state.step < until:
            state.advance(accumulation, sampler.batches_in)
        saved = json.loads(json.dumps(asdict(state)))
    assert totals[1] == totals[2]
    assert (totals[0] == totals[1]) == (change == "nothing")
    while state.step < totals[-1]:
        state.advance(accumulation, sampler.batches_in)
    if config is None:
        assert 10 * sampler.batches_in(0) - state.micro_batch in range(accumulation)  # what makes no whole step is left
    assert state.epoch in (9, 10)


def test_there_must_be_something_left_to_train():
    dataset, state = Clips(8), RunState("d", 4, step=20, micro_batch=20, epoch=10, epoch_start=20)
    sampler = build_sampler(dataset, 4, seed=1, rank=0, world_size=1)
    with pytest.raises(UserError, match=r"10 epochs of 2 batches, .* make 20 steps, and 20 are done\. Raise --epochs"):
        seek(END, sampler, state)
    assert seek(replace(END, epochs=11), sampler, state) == 22


def test_a_run_from_another_ones_weights_counts_the_steps_of_their_ema():
    state = RunState("d", 4).after({"step": 100}, "c")
    assert (state.step, state.steps_averaged) == (0, 100)
    state.advance(1, lambda epoch: 5)
    saved = json.loads(json.dumps(asdict(state)))
    assert RunState("d", 4).resumed(saved, "c").steps_averaged == 101
    assert RunState("x", 8).after(saved, "c").steps_averaged == 101


class TestRecord:
    def test_another_start_in_the_same_folder_keeps_the_first_record(self, tmp_path):
        for lr in (1, 2, 3):
            make_run_folder(str(tmp_path), "mine", "m", {"lr": lr}, resume=True)
        run = tmp_path / "mine"
        found = [json.loads((run / f"config{tail}.json").read_text())["lr"] for tail in ("", "-2", "-3")]
        assert found == [1, 2, 3]
        assert (run / "environment-3.json").is_file()

    def test_the_command_can_be_pasted_into_a_shell(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", "a b.py", "--prompt=it's $HOME"])
        monkeypatch.chdir(tmp_path)
        make_run_folder(str(tmp_path), "mine", "m", {})
        line = (tmp_path / "mine" / "command.txt").read_text()
        assert shlex.split(line) == ["cd", str(tmp_path), "&&", "python", *sys.argv]

    def test_under_torchrun(self, monkeypatch):
        for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8")):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", "c.py"])
        assert environment_module.command_line().endswith(
            "&& torchrun --nnodes 2 --nproc_per_node 8 scripts/train.py c.py"
        )

    def test_of_the_console_command(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["opensora train", "c.py", "--load", "latest"])
        assert environment_module.command_line().endswith("&& opensora train c.py --load latest")
        cfg = parse_config(TrainConfig, argv=["configs/quickstart/train.py"])
        assert "opensora train c.py --load run/step1" in what_to_do_next(cfg, "stopped", Path("run/step1"))
        assert "to sample: opensora sample run/step1 " in what_to_do_next(cfg, "", Path("run/step1"))
        for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8")):
            monkeypatch.setenv(name, value)
        assert environment_module.command_line(["opensora train", "c.py"]).endswith(
            "&& torchrun --standalone --nproc_per_node 8 -m opensora train c.py"
        )

    def test_what_differs_from_the_commit_is_kept(self, tmp_path, monkeypatch):
        """In a repository of its own: the patch, applied to the commit, gives the changed files."""
        source = tmp_path / "source"
        source.mkdir()
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(source)]
        (source / "environment.py").write_text("a = 1\n")
        (source / "data.bin").write_bytes(bytes(range(256)))
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
            subprocess.run([*git, *arguments], check=True)
        monkeypatch.setattr(environment_module, "__file__", str(source / "environment.py"))
        assert git_changes() == ""
        (source / "environment.py").write_text("a = 2\n")
        (source / "data.bin").write_bytes(bytes(range(255, -1, -1)))
        run = make_run_folder(str(tmp_path / "o"), None, "m", {})
        environment = json.loads((run / "environment.json").read_text())
        assert environment["git_commit"].endswith("-dirty")
        subprocess.run([*git, "checkout", "-q", "."], check=True)
        subprocess.run([*git, "apply", str(run / "changes.diff")], check=True)
        assert (source / "environment.py").read_text() == "a = 2\n"
        assert (source / "data.bin").read_bytes() == bytes(range(255, -1, -1))

    def test_without_a_repository(self, tmp_path, monkeypatch):
        """A virtualenv's package is in none, also where the virtualenv lies in one."""
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
        for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
            subprocess.run([*git, *arguments], check=True)
        (tmp_path / "environment.py").touch()
        monkeypatch.setattr(environment_module, "__file__", str(tmp_path / "environment.py"))
        run = make_run_folder(str(tmp_path / "o"), None, "m", {})
        assert json.loads((run / "environment.json").read_text())["git_commit"] is None
        assert not (run / "changes.diff").exists()


def test_parameters_by_top_level_module():
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 10)), "head": nn.Linear(10, 3)})
    model["blocks"][0].requires_grad_(False)
    rows = [line.split() for line in parameter_table(model).splitlines()]
    assert rows == [
        ["parameters", "trained", "frozen"],
        ["blocks", "1,010", "1,100"],
        ["head", "33", "0"],
        ["total", "1,043", "1,100"],
    ]


def test_shared_parameters_are_counted_once():
    layer = nn.Linear(10, 10)
    assert parameter_table(nn.ModuleDict({"a": layer, "b": layer})).splitlines()[-1].split() == ["total", "110", "0"]


def test_samples_of_a_step():
    assert effective_batch(4, 2, 3).splitlines()[1].strip() == "4 x 2 x 3 = 24"
    assert "each sample on 2 processes" in effective_batch(4, 2, 3, sp_size=2)


def test_samples_of_a_step_by_bucket():
    buckets = Buckets({"144p": {1: (1.0, 8), 16: (1.0, 2)}, "240p": {1: (0.0, None)}})
    lines = effective_batch(1, 4, 2, buckets=buckets).splitlines()[1:]
    assert len(lines) == sum(bucket.batch_size is not None for bucket in buckets)
    assert {line.split(": ")[1] for line in lines} == {"8 x 4 x 2 = 64", "2 x 4 x 2 = 16"}


def test_classes_are_named_by_number():
    assert class_list(["city", "dog & cup"]) == "\nclasses: 0 = city, 1 = dog & cup"
    assert class_list([str(i) for i in range(1000)]).endswith(
        "19 = 19 and 980 more, in the order of the folders' names"
    )
    assert class_list(()) == ""


def test_without_the_package_wandb_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[wandb\]'"):
        check_wandb()
