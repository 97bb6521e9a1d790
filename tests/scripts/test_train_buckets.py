"""scripts/train.py on clips and images of several sizes: STDiT2 and STDiT3 over buckets, exact resume, dry runs."""

import csv
import json
import logging
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = {"depth": 2, "hidden_size": 48, "num_heads": 2, "input_sq_size": 32}
MODELS = {
    "STDiT2": {"type": "STDiT2", **SMALL},
    "STDiT3": {"type": "STDiT3", **SMALL},
}
BUCKETS = {
    "48px": {1: (1.0, 3), 4: (0.7, 2), 8: ((0.6, 0.5), 1)},
    "32px": {1: (1.0, 4), 4: (1.0, 3), 8: (1.0, 2)},
}


@pytest.fixture(scope="session")
def mixed_table(tmp_path_factory, clips_csv) -> Path:
    """The repository's clips, and stills out of nothing, of several shapes."""
    folder = tmp_path_factory.mktemp("mixed")
    with clips_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))[::2]
    table = [
        {
            "path": str(clips_csv.parent / r["path"]),
            "text": r["text"],
            **{k: r[k] for k in ("num_frames", "height", "width")},
        }
        for r in rows
    ]
    for i, (height, width) in enumerate([(60, 80), (80, 60), (70, 70), (64, 64), (36, 64)]):
        Image.new("RGB", (width, height), (40 * i, 90, 200 - 30 * i)).save(folder / f"{i}.png")
        table.append(
            {"path": str(folder / f"{i}.png"), "text": f"a box {i}", "num_frames": 1, "height": height, "width": width}
        )
    path = folder / "mixed.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


@pytest.fixture
def bucket_config(tmp_path, toy_encoders, mixed_table):
    """`bucket_config("STDiT2")` -> a training config over buckets that takes milliseconds a step."""

    def write(model: str, **changes: object) -> Path:
        fields = {
            "dataset": {"type": "VariableVideoTextDataset"},
            "data_path": str(mixed_table),
            "frame_interval": 3,
            "bucket_config": BUCKETS,
            "num_workers": 0,
            "dtype": "fp32",
            "device": "cpu",
            "model": MODELS[model],
            "vae": {"type": "VideoAutoencoderKL", "from_pretrained": str(toy_encoders["vae"])},
            "text_encoder": {"type": "hf", "from_pretrained": str(toy_encoders["text"]), "model_max_length": 12},
            "scheduler": {"type": "iddpm"},
            "seed": 7,
            "max_steps": 12,
            "log_every": 1,
            "ckpt_every": 7,
            "lr": 1e-3,
            "ema_decay": 0.9,
        } | changes  # fmt: skip
        path = tmp_path / f"{model}.py"
        path.write_text('"""Toy."""\n' + "".join(f"{name} = {value!r}\n" for name, value in fields.items()))
        return path

    return write


@pytest.fixture
def train_on(train_script, tmp_path, monkeypatch):
    """Run scripts/train.py in this process; returns the run's folder."""

    def run(config: Path, *options: str, name: str = "run") -> Path:
        argv = ["train.py", str(config), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
        monkeypatch.setattr(sys, "argv", argv)
        train_script.main()
        return tmp_path / name

    return run


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(a: Path, b: Path) -> None:
    for part in ("model", "ema", "optimizer"):
        left, right = (open_checkpoint(complete_checkpoints(run)[-1]).tensors(part) for run in (a, b))
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run=True", "--epochs=9"], []])
def test_an_epoch_without_a_batch_is_not_helped_by_more_epochs(bucket_config, train_on, capsys, options):
    config = bucket_config("STDiT2", bucket_config={"48px": {1000: (1.0, 1)}})  # longer than any clip
    with pytest.raises(SystemExit, match="2"):
        train_on(config, *options)
    message = capsys.readouterr().err
    assert "an epoch has no batch" in message
    assert "tools.datasets.doctor" in message


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_k_then_resume_then_k_is_2k_bit_for_bit(model, bucket_config, train_on, train_script, monkeypatch):
    config, shapes = bucket_config(model), Counter()
    encode = train_script.BatchEncoder.__call__

    def noting(self, batch, generators):
        shapes[tuple(batch["video"].shape[2:])] += 1
        assert torch.equal(batch["ar"], batch["height"] / batch["width"])
        return encode(self, batch, generators)

    monkeypatch.setattr(train_script.BatchEncoder, "__call__", noting)
    whole = train_on(config, name="whole")
    assert len(shapes) >= 4
    assert {frames for frames, _, _ in shapes} >= {1, 4, 8}
    train_on(config, "--max-steps=7", name="half")
    rest = train_on(config, f"--load={complete_checkpoints(whole.parent / 'half')[-1]}", name="rest")
    assert_same_run(whole, rest)
    assert losses(whole)[7:] == losses(rest)
    assert all(0 < loss < 3 for loss in losses(whole))
    entries = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    seen = {tuple(map(int, name.split("x"))) for entry in entries for name in entry["buckets"]}
    assert seen == set(shapes)
    assert all(bucket.keys() == {"loss", "samples", "s_per_batch"} for e in entries for bucket in e["buckets"].values())


@pytest.mark.nightly
@pytest.mark.slow
def test_resume_across_epochs_with_workers_and_accumulation(bucket_config, train_on):
    config = bucket_config("STDiT2", accumulation_steps=2, max_steps=14, ckpt_every=9, epochs=3)
    whole = train_on(config, name="whole")
    state = open_checkpoint(complete_checkpoints(whole)[0]).state
    assert state["epoch"] >= 1
    assert state["micro_batch"] == 18
    rest = train_on(config, f"--load={complete_checkpoints(whole)[0]}", "--num-workers=2", name="rest")
    assert_same_run(whole, rest)


@pytest.mark.slow
def test_other_data_begin_a_new_epoch_when_asked(bucket_config, train_on, capsys):
    first = train_on(bucket_config("STDiT2", max_steps=3, ckpt_every=0), name="first")
    load = f"--load={complete_checkpoints(first)[-1]}"
    other = bucket_config("STDiT2", bucket_config={"32px": {1: (1.0, 4), 4: (1.0, 3)}}, max_steps=5, ckpt_every=0)
    with pytest.raises(SystemExit):
        train_on(other, load, name="refused")
    assert "--other-data next_epoch" in capsys.readouterr().err
    second = train_on(other, load, "--other-data=next_epoch", name="second")
    state = open_checkpoint(complete_checkpoints(second)[-1]).state
    assert (state["step"], state["epoch"], state["epoch_start"]) == (5, 1, 3)


def test_sizes_that_the_vae_does_not_take_are_moved(bucket_config, train_on, caplog):
    caplog.set_level(logging.INFO)
    config = bucket_config("STDiT2", bucket_config={"50x50": {1: (1.0, 3), 4: (1.0, 1)}}, max_steps=1)
    run = train_on(config)
    assert "bucket_config: moved to sizes that the VAE takes: 50x50 to 48x48." in caplog.text
    assert "48x48" in (run / "log.txt").read_text()


def test_a_dry_run_shows_what_becomes_of_the_data(bucket_config, train_on, tmp_path, capsys):
    train_on(bucket_config("STDiT2"), "--dry-run=True", name="dry")
    out = capsys.readouterr().out
    assert "16 samples in the table" in out
    assert "48px 4x" in out
    assert "an epoch: " in out
    assert not (tmp_path / "dry").exists()
    huge = bucket_config("STDiT2", bucket_config={"32px": {1: (1.0, 51)}}, bucket_tail="drop")
    with pytest.raises(SystemExit) as exit_:
        train_on(huge, "--dry-run=True", name="dry")
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert "5 samples are dropped" in out
    assert "bucket_tail='keep'" in out
    assert "nothing to train" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch-size=4",), "batch_size=4 has no effect with bucket_config"),
        (("--image-size", "32", "32"), "image_size=(32, 32) has no effect with bucket_config"),
        (("--dataset.transform_name=none",), "use 'resize_crop'"),
        (("--other-data=next_epoch",), "has no effect without load"),
    ],
)
def test_mistakes(bucket_config, train_on, capsys, options, said):
    with pytest.raises(SystemExit) as exit_:
        train_on(bucket_config("STDiT2"), *options, name="bad")
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_share_out_the_buckets_and_one_goes_on(bucket_config, run_ranks, train_on, tmp_path):
    config = bucket_config("STDiT3", bucket_order="same", max_steps=3, ckpt_every=0)
    run_ranks("scripts/train.py", config, f"--outputs={tmp_path}", "--exp-name=two")
    state = open_checkpoint(complete_checkpoints(tmp_path / "two")[-1]).state
    assert (state["world"], state["micro_batch"]) == (2, 3)
    one = train_on(config, f"--load={complete_checkpoints(tmp_path / 'two')[-1]}", "--max-steps=5", name="one")
    state = open_checkpoint(complete_checkpoints(one)[-1]).state
    assert state["segments"] == [[2, 3]]
    assert (state["world"], state["epoch"]) == (1, 0)


@pytest.mark.slow
def test_the_shipped_toy_config_trains(toy_encoders, train_on, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = [
        f"--text-encoder.from-pretrained={toy_encoders['text']}",
        "--text-encoder.model-max-length=12",
        "--max-steps=2",
        "--log-every=1",
        "--device=cpu",
    ]
    run = train_on(ROOT / "configs" / "quickstart" / "buckets.py", *options, name="toy")
    assert len(losses(run)) == 2
