"""Checkpoint folders: complete or absent, strict, safe."""

import json
import multiprocessing
import os
import re
import signal
import time

import pytest
import torch
from torch import nn

from opensora.checkpoint.load import complete_checkpoints, load_strictly, open_checkpoint, read_weights, save_checkpoint
from opensora.utils.errors import UserError
from tests.forks import forked


def save(path, step=1, value=0.0, size=4):
    parts = {"model": {"w": torch.full((size,), value)}, "optimizer": {"w/exp_avg": torch.zeros(size)}}
    return save_checkpoint(path, parts, state={"step": step}, manifest={"step": step, "model": "toy"})


def test_round_trip(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path / "a", step=3, value=2.5))
    assert checkpoint.state == {"step": 3}
    assert checkpoint.manifest["model"] == "toy"
    assert torch.equal(checkpoint.tensors("model")["w"], torch.full((4,), 2.5))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_saving_again_replaces(tmp_path):
    save(tmp_path / "a", value=1.0)
    save(tmp_path / "a", value=2.0)
    assert open_checkpoint(tmp_path / "a").tensors("model")["w"][0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_missing_folder_names_the_complete_ones(tmp_path):
    save(tmp_path / "epoch0-global_step5", step=5)
    with pytest.raises(UserError, match=r"no checkpoint at .*step6.*epoch0-global_step5"):
        open_checkpoint(tmp_path / "epoch0-global_step6")


def test_a_run_folder_is_no_checkpoint_but_says_what_is(tmp_path):
    save(tmp_path / "run" / "epoch0-global_step5", step=5)
    with pytest.raises(UserError, match=r"not a complete checkpoint.*epoch0-global_step5"):
        open_checkpoint(tmp_path / "run")


def test_a_damaged_checkpoint_names_others_the_last_five_and_not_itself(tmp_path):
    *_, last = [save(tmp_path / f"global_step{step}", step=step) for step in range(8)]
    (last / "state.json").unlink()
    names = ", ".join(f"global_step{step}" for step in (6, 5, 4, 3, 2))
    with pytest.raises(UserError, match=rf"Complete checkpoints in {re.escape(str(tmp_path))}: {names}, and 2 more\.$"):
        open_checkpoint(last)


@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_an_incomplete_checkpoint_is_refused(tmp_path, damage):
    path = save(tmp_path / "a")
    file = path / "optimizer" / "optimizer.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        file.unlink()
    with pytest.raises(UserError, match=r"not a complete checkpoint: optimizer/optimizer\.safetensors"):
        open_checkpoint(path)


def _save_for_ever(folder):
    step = 0
    while True:
        step += 1
        save(folder / f"s{step % 3}", step=step, size=200_000)


def test_a_kill_at_any_moment_leaves_only_complete_checkpoints(tmp_path):
    context = multiprocessing.get_context("fork")
    for wait in (0.05, 0.11, 0.17):
        process = context.Process(
            target=forked,
            args=(
                _save_for_ever,
                tmp_path,
            ),
        )
        process.start()
        time.sleep(wait)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for path in tmp_path.iterdir():
            if not path.name.startswith("."):
                open_checkpoint(path)


def test_complete_checkpoints_are_sorted_by_step(tmp_path):
    for step in (10, 9, 100):
        save(tmp_path / f"epoch0-global_step{step}", step=step)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("not json")
    assert [p.name.rpartition("step")[2] for p in complete_checkpoints(tmp_path)] == ["9", "10", "100"]


def test_wrapper_prefixes_are_stripped(tmp_path):
    torch.save({"model": {"module.a._orig_mod.w": torch.ones(1)}}, tmp_path / "w.pt")
    assert read_weights(tmp_path / "w.pt").keys() == {"a.w"}


def test_strict_loading_names_the_similar_key():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"(?s)1 missing in the file:\n\s+weight   \(similar: weights\)"):
        load_strictly(model, {"weights": torch.zeros(2, 2), "bias": torch.zeros(2)}, "file.pt")


def test_strict_loading_takes_neither_less_nor_more():
    model = nn.Linear(2, 2)
    whole = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    for state in ({"weight": whole["weight"]}, {**whole, "scale": torch.zeros(2)}, {**whole, "bias": torch.zeros(3)}):
        with pytest.raises(UserError, match="does not fit"):
            load_strictly(model, state, "file.pt")
    assert model.weight.abs().sum() > 0


def test_manifest_lists_every_file(tmp_path):
    path = save(tmp_path / "a")
    listed = json.loads((path / "manifest.json").read_text())["files"]
    there = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} - {"manifest.json"}
    assert set(listed) == there
