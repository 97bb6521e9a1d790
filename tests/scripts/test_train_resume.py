"""scripts/train.py: a resume equals the uninterrupted run, for every engine and number of processes; signals; `latest`."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
from tests.scripts.processes import finish, last_step, processes, wait_for

PARTS = ("model", "ema", "optimizer")
# the resume at step 3 is inside the warm-up and inside an epoch
OPTIONS = (
    "--max-steps=6",
    "--ckpt-every=3",
    "--warmup-steps=5",
)
ACCUMULATED = (*OPTIONS, "--accumulation-steps=4")


def entries(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values(run: Path, name: str) -> list[float]:
    return [entry[name] for entry in entries(run)]


def assert_same_end(a: Path, b: Path) -> None:
    for part in PARTS:
        left, right = (open_checkpoint(complete_checkpoints(run)[-1]).tensors(part) for run in (a, b))
        assert set(left) == set(right)
        assert len(left) > 0
        assert [name for name in left if not torch.equal(left[name], right[name])] == [], part


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "dtype"), [("ddp", "fp32"), ("fsdp2", "fp32"), ("ddp", "bf16"), ("fsdp2", "fp16")])
def test_one_process(train, plugin, dtype):
    options = (*ACCUMULATED, f"--plugin={plugin}", f"--dtype={dtype}", "--batch-size=2")
    whole = train(*options, name="whole")
    rest = train(*options, f"--load={complete_checkpoints(whole)[0]}", name="rest")
    assert_same_end(whole, rest)
    assert values(whole, "loss")[3:] == values(rest, "loss")
    assert values(whole, "lr")[3:] == values(rest, "lr")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [
    pytest.param("adamw8bit", marks=pytest.mark.extra),
    pytest.param("muon", marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with torch 2.9")),
])  # fmt: skip
def test_every_optimizer(train, optimizer, capsys):
    """To the bit, inside the warm-up; and another cannot take its state over."""
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao")
    options = (*OPTIONS, "--batch-size=2", "--model.hidden_size=128")
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        whole = train(*options, f"--optimizer={optimizer}", name="whole")
        first = f"--load={complete_checkpoints(whole)[0]}"
        rest = train(*options, f"--optimizer={optimizer}", first, name="rest")
    assert_same_end(whole, rest)
    assert values(whole, "loss")[3:] == values(rest, "loss")
    state = open_checkpoint(complete_checkpoints(rest)[-1]).tensors("optimizer")
    layer = "blocks.0.mlp.fc1"
    own = {
        "muon": {"momentum_buffer"},
        "adamw8bit": {"step", *(f"exp_avg{end}" for end in ("", "_scale", "_sq", "_sq_scale"))},
    }
    assert {name.rpartition("/")[2] for name in state if name.startswith(f"{layer}.weight/")} == own[optimizer]
    assert {name.rpartition("/")[2] for name in state if name.startswith(f"{layer}.bias/")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    with pytest.raises(SystemExit, match="2"):
        train(*options, first, name="other")
    assert f"has the state of optimizer='{optimizer}', which 'adamw' cannot continue" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_engines_and_numbers_of_processes(train, together, tmp_path):
    """In one start of 2 processes and one of 4; the same 4 micro-batches of 4 samples a step throughout."""
    plain = train(*OPTIONS, "--batch-size=1", name="plain")
    one = train(*ACCUMULATED, "--batch-size=4", name="one")
    name = complete_checkpoints(one)[0].name
    at = {plugin: f"--load={tmp_path / plugin / name}" for plugin in ("ddp", "fsdp2")}
    pairs = [("ddp", "ddp"), ("fsdp2", "fsdp2"), ("ddp", "fsdp2"), ("fsdp2", "ddp")]
    two = (*ACCUMULATED, "--batch-size=2")
    runs = [(plugin, *two, f"--plugin={plugin}") for plugin in at]
    runs += [(f"{a}-{b}", *two, at[a], f"--plugin={b}") for a, b in pairs]
    together(*runs)
    together(("four", *ACCUMULATED, "--batch-size=1", at["ddp"], "--plugin=fsdp2"), processes=4)
    assert_same_end(tmp_path / "ddp", tmp_path / "ddp-ddp")
    assert_same_end(tmp_path / "fsdp2", tmp_path / "fsdp2-fsdp2")
    sharded = open_checkpoint(tmp_path / "fsdp2" / name)
    assert {file.name for file in (sharded.path / "optimizer").iterdir()} == {
        f"optimizer-0000{rank}-of-00002.safetensors" for rank in range(2)
    }
    for name in (*at, *(f"{a}-{b}" for a, b in pairs), "four"):
        done = 0 if name in at else 3
        assert values(tmp_path / name, "lr") == values(plain, "lr")[done:]  # a function of the optimizer step alone
        # no sample is lost or seen twice, whoever reads it: the mean over the step's 16 is the same
        torch.testing.assert_close(values(tmp_path / name, "loss"), values(one, "loss")[done:], atol=1e-5, rtol=1e-5)


# on two processes: sequence parallelism, checkpointing, accumulation, dtypes, every way to shard state
TOGETHER = {
    "sp": ("--sp-size=2", "--plugin=ddp", "--accumulation-steps=2", "--grad-checkpoint=block"),
    "sp-zero3": ("--sp-size=2", "--plugin=fsdp2", "--fsdp-reshard=zero3", "--dtype=bf16", "--grad-checkpoint=mlp"),
    "sp-hybrid": ("--sp-size=2", "--plugin=ddp", "--hybrid-zero=True", "--dtype=fp16"),
    "hybrid": ("--plugin=ddp", "--hybrid-zero=True", "--dtype=bf16", "--accumulation-steps=2"),
    "zero2": ("--plugin=fsdp2", "--dtype=bf16", "--optimizer-offload=True", "--grad-checkpoint=selective"),
}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.nightly
def test_two_processes_with_all_there_is(train, together, tmp_path):
    """Each to the bit; and a run on two processes that share samples resumes on one."""
    common = ("--max-steps=4", "--ckpt-every=2", "--batch-size=2")
    whole = together(*((name, *common, *options) for name, options in TOGETHER.items()))
    half = [f"--load={complete_checkpoints(run)[0]}" for run in whole]
    pairs = zip(TOGETHER.items(), half, strict=True)
    rest = together(*((f"{name}-rest", *common, *options, load) for (name, options), load in pairs))
    for one, other in zip(whole, rest, strict=True):
        assert_same_end(one, other)
        assert values(one, "loss")[2:] == values(other, "loss"), one.name
    alone = train(*common, "--accumulation-steps=2", half[0], name="alone")
    torch.testing.assert_close(values(alone, "loss"), values(whole[0], "loss")[2:], atol=1e-5, rtol=1e-5)


def steps_logged(run: Path) -> int:
    return len(entries(run)) if (run / "metrics.jsonl").is_file() else 0


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_the_same_step_and_latest_goes_on(toy_config, tmp_path):
    run = tmp_path / "run"
    options = ("--batch-size=1", "--load=latest", "--exp-name=run", "--ckpt-every=0", "--keep-last-n=1")
    with processes(2, toy_config, tmp_path, *options, "--max-steps=100000") as started:
        wait_for(lambda: steps_logged(run) >= 2)
        os.kill(started[1].pid, signal.SIGUSR1)
        finish(started)
    (first,) = complete_checkpoints(run)
    step = open_checkpoint(first).state["step"]
    assert values(run, "step") == list(range(1, step + 1))
    with processes(2, toy_config, tmp_path, *options, f"--max-steps={step + 2}") as started:
        finish(started)
    (last,) = complete_checkpoints(run)
    assert open_checkpoint(last).state["step"] == step + 2
    assert values(run, "step") == list(range(1, step + 3))
    log = (run / "log.txt").read_text()
    assert f"SIGUSR1: {run} at step {step}" in log
    assert f"resumed {first} at step {step}" in log
    configs = [json.loads((run / f"config{tail}.json").read_text()) for tail in ("", "-2")]
    assert [config["max_steps"] for config in configs] == [100000, step + 2]
    assert "--max-steps=100000" in (run / "command.txt").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_sigterm_to_a_whole_process_group_with_data_workers(toy_config, tmp_path):
    """As torchrun sends it; the workers go on until the step is done."""
    run = tmp_path / "run"
    options = ("--batch-size=1", "--exp-name=run", "--ckpt-every=0", "--num-workers=2", "--max-steps=100000")
    with processes(1, toy_config, tmp_path, *options) as started:
        wait_for(lambda: steps_logged(run) >= 2)
        os.killpg(started[0].pid, signal.SIGTERM)
        finish(started)
    (path,) = complete_checkpoints(run)
    assert open_checkpoint(path).state["step"] == entries(run)[-1]["step"]


@pytest.mark.slow
@pytest.mark.nightly
def test_kill_9_leaves_a_run_that_latest_goes_on_with(toy_config, tmp_path):
    """A checkpoint every step, killed three times; the learnt state is those of a run that nobody killed."""
    options = (
        "--batch-size=2",
        "--load=latest",
        "--exp-name=run",
        "--ckpt-every=1",
        "--keep-last-n=2",
        "--max-steps=24",
    )
    done = 0
    for _ in range(3):
        with processes(1, toy_config, tmp_path, *options) as started:
            wait_for(lambda: complete_checkpoints(tmp_path / "run")[-1:] != [] and last_step(tmp_path) > done)  # noqa: B023
            started[0].kill()
        done = last_step(tmp_path)
    with processes(1, toy_config, tmp_path, *options) as started:
        finish(started)
    whole = (*options[:1], "--exp-name=whole", "--ckpt-every=0", "--max-steps=24")
    with processes(1, toy_config, tmp_path, *whole) as started:
        finish(started)
    for part in PARTS[:3]:
        left, right = (open_checkpoint(complete_checkpoints(tmp_path / n)[-1]).tensors(part) for n in ("run", "whole"))
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_runs_folder_is_enough_to_run_it_again(train, train_script, tmp_path, monkeypatch):
    run = train("--max-steps=3", "--ckpt-every=0", "--batch-size=2")
    again = ["train.py", str(run / "config.json"), f"--outputs={tmp_path}", "--exp-name=again"]
    monkeypatch.setattr(sys, "argv", again)
    train_script.main()
    assert values(run, "loss") == values(tmp_path / "again", "loss")
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"]
    command = (run / "command.txt").read_text()
    assert command.startswith("cd ")
    assert "&& python train.py" in command
    assert "--max-steps=3" in command
