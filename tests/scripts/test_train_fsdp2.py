"""scripts/train.py with the engine fsdp2: in one process and in two, and a resume that changes engine and processes."""

import logging
import sys

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints
from opensora.config.load import TrainConfig
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
        (("--plugin=zero2",), "plugin='zero2' needs a GPU"),
    ):
        with pytest.raises(SystemExit):
            train(*options)
        assert words in capsys.readouterr().err


def test_a_recipe_for_colossalai_trains_here_as_zero2(toy_config, train, train_script, caplog):
    caplog.set_level(logging.INFO)
    plain = train("--max-steps=2", "--plugin=fsdp2", name="plain")
    recipe = plain.parent / "recipe.py"
    recipe.write_text(f"_base_ = {str(toy_config)!r}\nplugin = 'zero2-seq'\nsp_size = 2\n")
    sys.argv = ["train.py", str(recipe), f"--outputs={plain.parent}", "--exp-name=recipe", "--max-steps=2"]
    train_script.main()
    assert losses(plain.parent / "recipe") == losses(plain)
    assert "plugin='zero2-seq' of the config needs ColossalAI, a GPU and bf16 or fp16: plugin='fsdp2'" in caplog.text
    assert "sp_size=2 of the config does not divide 1 processes: sp_size=1." in caplog.text


def test_what_the_command_line_asks_for_is_not_replaced(train_script, monkeypatch):
    parts = {name: {} for name in ("model", "vae", "text_encoder", "scheduler", "dataset")}
    recipe = TrainConfig(**parts, plugin="zero2", sp_size=2)

    def fitted(*typed):
        cfg, notes = train_script.fit_to_machine(recipe, ["recipe.py", *typed])
        return cfg.plugin, cfg.sp_size, len(notes)

    assert fitted() == ("fsdp2", 1, 2)  # one of Open-Sora's files says zero2 with sp_size=2
    assert fitted("--plugin", "zero2", "--sp-size", "2") == ("zero2", 2, 0)
    assert fitted("--plugin", "zero2") == ("zero2", 1, 1)
    assert fitted("--lr", "1", "--sp-size", "2") == ("fsdp2", 2, 1)
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert fitted() == ("fsdp2", 2, 1)
    monkeypatch.setattr(train_script, "check_engine", lambda *_, **__: None)  # as where ColossalAI is installed
    assert fitted() == ("zero2-seq", 2, 0)


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
