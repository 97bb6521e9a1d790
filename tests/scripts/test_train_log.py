"""What a run of scripts/train.py says of itself: log.txt, metrics.jsonl and TensorBoard; once, whatever is resumed."""

import json
from pathlib import Path

import pytest

from opensora.checkpoint.load import complete_checkpoints
from opensora.models import loading
from opensora.registry import MODELS
from opensora.training.run import warn_of_random_weights


def entries(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_runs_figures_and_its_first_lines(train, capsys):
    run = train(
        "--peak-tflops=0.5", "--accumulation-steps=2", "--grad-checkpoint=mlp", "--max-steps=6", "--log-every=2"
    )
    text, last = (run / "log.txt").read_text(), entries(run)[-1]
    assert [entry["step"] for entry in entries(run)] == [2, 4, 6]
    assert {
        "loss", "lr", "grad_norm", "epoch", "samples_per_s", "tokens_per_s", "s_per_step", "data_wait", "mfu",
    } <= last.keys()  # fmt: skip
    assert last["samples_per_s"] * last["s_per_step"] == pytest.approx(8)
    # 2 latent frames of 2 x 3 cells, patches of 1 x 2 x 2
    assert last["tokens_per_s"] * last["s_per_step"] == pytest.approx(8 * 2 * 2)
    assert 0 < last["mfu"] < 1
    assert 0 <= last["data_wait"] < 1
    assert "mfu" not in entries(run)[0]  # the first figures would be those of the start
    for said in ("y_embedder", "4 x 1 x 2 = 8", "MFU is of 0.5 TFLOP/s", "epoch 0, steps 1 to"):
        assert said in text, said


def test_a_run_that_goes_on_in_its_folder_has_every_step_once(train):
    run = train("--max-steps=4", "--ckpt-every=2")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')  # taken after the checkpoint, and killed
    train("--max-steps=6", "--ckpt-every=2", "--load=latest")
    assert [entry["step"] for entry in entries(run)] == [1, 2, 3, 4, 5, 6]
    assert all("lr" in entry for entry in entries(run))


def test_the_first_lines_warn_of_random_weights_and_of_data_that_fill_no_batch(train, repo_root, tmp_path, monkeypatch):
    monkeypatch.setitem(loading.RELEASED, "STDiT-XXS/2", ("tiny.pth", "owner/tiny"))
    rows = (repo_root / "assets/clips/clips.csv").read_text().splitlines()[:3]
    (tmp_path / "two.csv").write_text("\n".join(rows) + "\n")
    options = [f"--data-path={tmp_path / 'two.csv'}", f"--root={repo_root / 'assets/clips'}", "--ckpt-every=1"]
    text = (train(*options, "--max-steps=1") / "log.txt").read_text()
    weights = "warning: STDiT-XXS/2 starts from random weights. To start from released ones: --ckpt-path tiny.pth or owner/tiny"
    assert weights in text
    assert "has 4 samples (batch_size=4 x 1), and the data 2: each batch holds them up to 2 times" in text
    assert "set --batch-size 2 or less" in text
    resumed = (train(*options, "--max-steps=2", "--load=latest") / "log.txt").read_text().removeprefix(text)
    assert weights not in resumed


def test_only_models_of_a_released_size_are_warned_of():
    assert "PixArt-XL-2-512x512.pth or OpenSora-v1-HQ-16x256x256.pth" in warn_of_random_weights({"type": "STDiT-XL/2"})
    for model in (
        {"type": "STDiT-XL/2", "from_pretrained": "weights.pth"},
        {"type": "STDiT-XL/2", "depth": 2},
        {"type": "STDiT-XS/2"},
    ):
        assert warn_of_random_weights(model) == ""
    names = {name for name in loading.RELEASED if name not in MODELS.choices()}
    assert not names


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_process_of_two_keeps_the_log(together):
    options = ("--max-steps=3", "--ckpt-every=0", "--batch-size=2", "--activation-offload=True", "--grad-checkpoint=1")
    (run,) = together(("two", *options))
    assert [entry["step"] for entry in entries(run)] == [1, 2, 3]
    assert len(list((run / "tensorboard").iterdir())) == 1
    text = (run / "log.txt").read_text()
    assert text.count("run folder") == 1
    assert "2 x 2 x 1 = 4" in text
    assert len(complete_checkpoints(run)) == 1


class TestSettings:
    def refused(self, capsys, train, *options: str) -> str:
        with pytest.raises(SystemExit):
            train(*options)
        return capsys.readouterr().err

    def test_of_checkpointing(self, capsys, train):
        assert "none, block, every:k" in self.refused(capsys, train, "--grad-checkpoint=blocks")
        assert "mlp:1/3" in self.refused(capsys, train, "--grad-checkpoint=4")
        message = self.refused(capsys, train, "--grad-checkpoint=selective", "--activation-offload=True")
        assert "use 'block'" in message

    def test_without_effect(self, capsys, train):
        assert "max_skipped=3 has no effect" in self.refused(capsys, train, "--max-skipped=3")
