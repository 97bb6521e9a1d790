"""The log of a run: what it writes, what it forgets after a resume, and what it survives."""

import json
from pathlib import Path

import pytest

from opensora.training.run_log import RunLog


def entries(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_goes_on_has_no_step_twice(tmp_path):
    log = RunLog(tmp_path)
    for step in (2, 4, 6):
        log.metrics(step, loss=1.0, buckets={"1x64x64": {"loss": 2.0}})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "los')  # killed while it wrote
    log = RunLog(tmp_path, start=4)  # from the checkpoint of step 4
    log.metrics(6, loss=0.5)
    log.close()
    assert [(entry["step"], entry["loss"]) for entry in entries(tmp_path)] == [(2, 1.0), (4, 1.0), (6, 0.5)]
    assert entries(tmp_path)[0]["buckets"] == {"1x64x64": {"loss": 2.0}}


def test_a_line_is_in_the_file_at_once(tmp_path):
    log = RunLog(tmp_path)
    log.metrics(1, loss=1.0)
    assert entries(tmp_path) == [{"step": 1, "loss": 1.0}]
    log.close()


def test_tensorboard_has_the_buckets_and_forgets_later_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (1, (2,))):
        log = RunLog(tmp_path, start=start)
        for step in steps:
            log.metrics(step, loss=float(step + 10 * start), buckets={"a": {"loss": 1.0}})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "buckets/a/loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 12.0)]


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = RunLog(None, wandb=True)
    log.line("hello")
    log.metrics(1, loss=1.0)
    log.start_progress(0, 3)
    log.advance()
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_no_run(tmp_path):
    """The checkpoint that comes after a line of the log matters more."""
    log = RunLog(tmp_path)
    log._jsonl.close()
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_jsonl", full)  # what the system says of a full disk
        log.metrics(1, loss=1.0)
        log.metrics(2, loss=1.0)
        log.close()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("metrics.jsonl does not have all of this run: [Errno 28]") == 1
