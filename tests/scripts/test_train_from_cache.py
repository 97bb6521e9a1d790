"""scripts/train.py cannot tell a cache from the encoders: the same losses, step by step."""

import csv
import functools
import json
import sys

import pytest
import torch

from opensora.acceleration.offload import OffloadedModule
from opensora.checkpoint.load import complete_checkpoints
from opensora.models.vae.video import DiffusersVideoVAE
from opensora.registry import MODELS
from opensora.schedulers.iddpm.iddpm import IDDPM
from tests.models.vaes import ARCHITECTURES
from tests.scripts.runs import all_losses, assert_same_run
from tests.scripts.runs import losses as losses_of
from tools.cache_features import cache_features

STEPS = ("--max-steps=6", "--ckpt-every=0")


def entries_of(run, name):
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry[name] for entry in entries if name in entry]


def losses(run):
    return entries_of(run, "loss")


@pytest.fixture
def train_with(train_script, toy_config, tmp_path, monkeypatch):
    """Run scripts/train.py with another text encoder in its config."""

    def run(encoder: str, *options: str, name: str):
        lines = toy_config.read_text().splitlines()
        lines = [f"text_encoder = {encoder}" if line.startswith("text_encoder") else line for line in lines]
        (tmp_path / "config.py").write_text("\n".join(lines))
        argv = ["train.py", str(tmp_path / "config.py"), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
        monkeypatch.setattr(sys, "argv", argv)
        train_script.main()
        return tmp_path / name

    return run


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["mode", "sample"])
def test_losses_from_a_cache_are_those_of_training_on_the_fly(train, train_with, toy_config, tmp_path, posterior):
    # 6 steps of 4 over 21 clips: the second epoch begins at step 5
    columns = "--dataset.text_columns=['text', 'text_2']"
    cache, options = tmp_path / "cache", [*STEPS, f"--vae.posterior={posterior}", columns]
    fly = losses(train(*options, name="fly"))
    job = [str(toy_config), f"--cache-dir={cache}", "--moments-dtype=fp32", columns]
    cache_features([*job, "--what", "moments", "text"])
    cache_features([*job, "--epochs", "2"])
    stored = [
        "--dataset.type=CachedVideoTextDataset", f"--dataset.cache_dir={cache}", "--dataset.text=features",
    ]  # fmt: skip
    encoder = f"dict(type='cached', cache_dir={str(cache)!r})"
    samples = losses(train(*options, *stored, "--dataset.content=samples", name="samples"))
    assert samples == fly  # the same arithmetic: not one bit differs
    clips = losses(train_with(encoder, *options, *stored, "--num-workers=2", name="clips"))
    assert clips == pytest.approx(fly, rel=1e-6)  # frames are encoded in other groups
    words = losses(train_with(encoder, *options, name="words"))  # pixels, with the cached encoder
    assert words == fly


VALIDATED = (
    "--max-steps=3", "--ckpt-every=0", "--batch-size=2", "--val-every=2", "--val-prompts", "a grey rabbit", "a dog",
    "--val-scheduler={'type': 'iddpm', 'num_sampling_steps': 2}",
)  # fmt: skip


@pytest.fixture
def loads(monkeypatch) -> list[OffloadedModule]:
    """What is loaded, in order; that none of it stays while the denoiser trains is checked at each step."""
    seen, load, training_losses = [], OffloadedModule.load, IDDPM.training_losses

    @functools.wraps(training_losses)
    def checked(*args, **kwargs):
        assert not any(part.loaded for part in seen)
        return training_losses(*args, **kwargs)

    monkeypatch.setattr(OffloadedModule, "load", lambda self: (seen.append(self), load(self)))
    monkeypatch.setattr(IDDPM, "training_losses", checked)
    return seen


@pytest.mark.slow
def test_encoders_that_are_offloaded_change_nothing(train, loads):
    plain = train(*VALIDATED, name="plain")
    assert not loads
    offloaded = train(*VALIDATED, "--encoder-offload=True", name="offloaded")
    assert losses_of(offloaded) == losses_of(plain)
    assert_same_run(offloaded, plain)
    for name in ("sample_0000.mp4", "sample_0001.mp4"):
        a, b = (run / "validation" / "step2" / name for run in (offloaded, plain))
        assert a.read_bytes() == b.read_bytes()
    # each of 3 steps and 2 prompts: the text, and the video's latents or frames
    assert len(loads) == 2 * 3 + 2 * 2


@pytest.mark.slow
def test_a_cache_loads_no_encoder_but_for_the_videos_of_a_validation(train, loads, toy_config, clips_csv, tmp_path):
    cache, table = tmp_path / "cache", tmp_path / "clips.csv"
    table.write_text("".join(clips_csv.read_text().splitlines(keepends=True)[:5]))
    data = (f"--data-path={table}", f"--dataset.root={clips_csv.parent}")
    cache_features([str(toy_config), *data, f"--cache-dir={cache}", "--what", "moments", "text"])
    stored = (
        *data, "--dataset.type=CachedVideoTextDataset", f"--dataset.cache_dir={cache}", "--dataset.text=features",
    )  # fmt: skip
    plain = train("--max-steps=3", "--ckpt-every=0", "--batch-size=2", *stored, name="plain")
    assert not loads
    validated = train(*VALIDATED, *stored, name="validated")
    assert len(loads) == 2 * 2
    assert losses_of(validated) == losses_of(plain)
    assert_same_run(validated, plain)
    assert (validated / "validation" / "step2" / "sample_0001.mp4").stat().st_size > 0


WAN = {
    "type": "Wan", "in_channels": 4, "hidden_size": 24, "depth": 1, "num_heads": 2, "ffn_dim": 32,
    "caption_channels": 16, "model_max_length": 12, "condition_channels": 8, "image_dim": 20,
}  # fmt: skip
SIZES = {  # three sizes, two lengths
    "48x64": {9: ((0.7, 0.6), 2), 5: (0.6, 2)},
    "32x48": {9: ((0.7, 0.6), 2), 5: (0.6, 3)},
    "32x32": {9: ((1.0, 0.8), 2), 5: (1.0, 2)},
}


@pytest.fixture(scope="module")
def wan(tmp_path_factory, toy_encoders, clips_csv):
    """A config of a tiny Wan 2.1 that makes videos from images, as a LoRA over buckets of three sizes and two lengths."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    architecture = {"type": "AutoencoderKLWan", **ARCHITECTURES["AutoencoderKLWan"]}
    DiffusersVideoVAE(architecture=architecture).save_pretrained(folder / "vae")
    vision = {"hidden_size": 20, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(**vision, patch_size=14)).save_pretrained(folder / "clip" / "image_encoder")
    CLIPImageProcessor().save_pretrained(folder / "clip" / "image_processor")
    MODELS.build(WAN).net.save_pretrained(folder / "transformer")
    with clips_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))[::3]
    columns = ("path", "text", "text_2", "num_frames", "height", "width")
    with (folder / "clips.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({name: row[name] for name in columns} for row in rows)
    fields = {
        "dataset": {"type": "VariableVideoTextDataset", "text_columns": ["text", "text_2"], "root": str(clips_csv.parent)},
        "data_path": str(folder / "clips.csv"), "bucket_config": SIZES, "frame_interval": 2, "num_workers": 0,
        "dtype": "fp32", "device": "cpu", "model": {**WAN, "from_pretrained": str(folder / "transformer")},
        "vae": {"type": "DiffusersVideoVAE", "from_pretrained": str(folder / "vae")},
        "text_encoder": {"type": "hf", "from_pretrained": str(toy_encoders["text"]), "model_max_length": 12},
        "image_encoder": {"type": "clip-vision", "from_pretrained": str(folder / "clip")},
        "scheduler": {"type": "rflow"}, "lora": {"rank": 4, "alpha": 4, "target_modules": "all-linear"}, "seed": 7,
        "max_steps": 12, "log_every": 1, "ckpt_every": 6, "lr": 1e-3,
    }  # fmt: skip
    path = folder / "wan.py"
    path.write_text('"""Toy."""\n' + "".join(f"{name} = {value!r}\n" for name, value in fields.items()))
    return path


@pytest.fixture
def train_wan(train_script, wan, tmp_path, monkeypatch):
    def run(*options: str, name: str):
        monkeypatch.setattr(
            sys, "argv", ["train.py", str(wan), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
        )
        train_script.main()
        return tmp_path / name

    return run


@pytest.fixture(scope="module")
def wan_cache(wan):
    """Of three windows of each clip."""
    done = cache_features([str(wan), f"--cache-dir={wan.parent}/cache", "--epochs=3", "--moments-dtype=fp32"])
    assert done["buckets"] == done["conditions"] == done["images"]
    return ["--dataset.type=CachedVariableVideoTextDataset", f"--dataset.cache_dir={wan.parent}/cache"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_wan_lora_trains_from_cached_buckets_as_from_the_videos(train_wan, wan, wan_cache):
    held_out = (
        "--val-every=12",
        f"--val-data-path={wan.parent}/clips.csv",
        "--val-num-samples=3",
        "--val-num-timesteps=1",
    )
    fly = train_wan(*held_out, name="fly")
    used = [set(entry) for entry in entries_of(fly, "buckets")]
    assert len(set().union(*used)) == 6
    cached = train_wan(*wan_cache, *held_out, name="cached")
    assert [set(entry) for entry in entries_of(cached, "buckets")] == used
    assert max(entries_of(fly, "epoch")) > 1
    expected = all_losses(fly)
    assert any(name.startswith("val/") for name, _ in expected)
    assert [name for name, _ in all_losses(cached)] == [name for name, _ in expected]
    assert [loss for _, loss in all_losses(cached)] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    rest = train_wan(*wan_cache, f"--load={complete_checkpoints(cached)[0]}", "--num-workers=2", name="rest")
    assert_same_run(cached, rest)
    assert losses(cached)[6:] == losses(rest)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_from_cached_buckets_as_from_the_videos(run_ranks, wan, wan_cache, tmp_path):
    options = (wan, f"--outputs={tmp_path}", "--max-steps=4")
    run_ranks("scripts/train.py", *options, "--exp-name=fly")
    run_ranks("scripts/train.py", *options, "--exp-name=cached", *wan_cache)
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "fly"), rel=1e-6)
