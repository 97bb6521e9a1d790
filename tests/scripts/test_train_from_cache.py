"""scripts/train.py cannot tell a cache from the encoders: the same losses, step by step."""

import functools
import json
import sys

import pytest

from opensora.acceleration.offload import OffloadedModule
from opensora.schedulers.iddpm.iddpm import IDDPM
from tests.scripts.runs import assert_same_run
from tests.scripts.runs import losses as losses_of
from tools.cache_features import cache_features

STEPS = ("--max-steps=6", "--ckpt-every=0")


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


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
