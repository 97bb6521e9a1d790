"""scripts/train.py cannot tell a cache from the encoders: the same losses, step by step."""

import json
import sys

import pytest

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
