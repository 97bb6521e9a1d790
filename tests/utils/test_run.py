"""Run folders never clash; a resume that would mean something else is refused."""

import shutil
from dataclasses import asdict

import pytest

from opensora.utils.errors import UserError
from opensora.utils.run import RunState, due, make_run_folder


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
    state.advance(2, 20)
    again = RunState("abc", 0, world=1).resumed(asdict(state), "c")
    assert again.segments == [(4, 3), (2, 2)]
    again.advance(15, 20)
    assert (again.epoch, again.segments) == (2, [])


def test_other_data_begin_the_next_epoch_when_asked():
    saved = {"data": "abc", "global_batch": 4, "step": 7, "micro_batch": 14, "epoch": 1, "epoch_start": 10}
    state = RunState("xyz", 8).resumed(saved, "c", other_data="next_epoch")
    assert (state.step, state.micro_batch, state.epoch, state.batch_in_epoch) == (7, 14, 2, 0)
    assert RunState("abc", 4).resumed(saved, "c", other_data="next_epoch").batch_in_epoch == 4


def test_due():
    assert [due(step, 3) for step in (1, 2, 3, 6)] == [False, False, True, True]
    assert not due(3, 0)
