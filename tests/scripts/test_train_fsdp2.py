"""scripts/train.py with the engine fsdp2: in one process and in two, and a resume that changes engine and processes."""

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints
from tests.scripts.runs import assert_same_run, losses, tensors


def test_one_process_trains_as_ddp_does(train):
    ddp = train("--max-steps=2", name="ddp")
    fsdp2 = train("--max-steps=2", "--plugin=fsdp2", "--fsdp-reshard=zero3", name="fsdp2")
    torch.testing.assert_close(losses(ddp), losses(fsdp2), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(tensors(ddp, "ema"), tensors(fsdp2, "ema"), atol=2e-5, rtol=1e-4)


def test_settings_of_another_engine_are_refused(train, capsys):
    for options, words in (
        (("--fsdp-reshard=zero3",), "fsdp_reshard='zero3' has no effect with plugin='ddp'"),
        (("--shard-size=2",), "shard_size=2 has no effect with plugin='ddp' without hybrid_zero=True"),
        (("--plugin=fsdp2", "--shard-size=2", "--hybrid-zero=True"), "which says the same"),
        (("--plugin=zero2", "--dtype=bf16", "--optimizer-offload=True"), "no effect with plugin='zero2'"),
        (("--plugin=zero2",), "plugin='zero2' computes in bf16 or fp16"),
    ):
        with pytest.raises(SystemExit):
            train(*options)
        assert words in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_and_a_resume_with_another_engine(train, together):
    settings = ("--plugin=fsdp2", "--ema-every=2", "--ema-device=cpu")
    one = train("--batch-size=4", "--ema-every=2", name="one")
    (two,) = together(("two", "--batch-size=2", *settings))
    torch.testing.assert_close(losses(one), losses(two), atol=1e-6, rtol=1e-5)
    for part in ("model", "ema"):
        torch.testing.assert_close(tensors(one, part), tensors(two, part), atol=2e-5, rtol=1e-4)
    half = complete_checkpoints(two)[0]
    (again,) = together(("again", "--batch-size=2", *settings, f"--load={half}"))
    assert_same_run(two, again)
    alone = train("--batch-size=4", "--ema-every=2", f"--load={half}", name="alone")
    torch.testing.assert_close(losses(alone), losses(two)[2:], atol=1e-6, rtol=1e-5)
