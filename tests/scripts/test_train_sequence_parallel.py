"""scripts/train.py with --sp-size: two processes that share every sample train as one process does."""

import json

import pytest

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint


def metrics(run, name):
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_that_share_samples_train_as_one(train, together):
    one = train("--max-steps=3", "--grad-clip=1")
    (two,) = together(("two", "--max-steps=3", "--grad-clip=1", "--sp-size=2"))
    for name in ("loss", "grad_norm"):
        assert metrics(two, name) == pytest.approx(metrics(one, name), rel=1e-5)
    left, right = (open_checkpoint(complete_checkpoints(run)[-1]) for run in (one, two))
    assert right.state["world"] == left.state["world"] == 1  # of data parallelism: a resume may go on with either
    assert left.tensors("model").keys() == right.tensors("model").keys()


def test_one_process_cannot_share(capsys, train):
    with pytest.raises(SystemExit):
        train("--sp-size=2")
    assert "sp_size=2 does not divide the number of processes, 1. Here it can be 1" in capsys.readouterr().err
