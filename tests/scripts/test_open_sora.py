"""Files of Open-Sora, as they are, through the scripts: the command line makes them small and names what is on this machine."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from tests.config.open_sora import all_files, write

ROOT = Path(__file__).parents[2]
CLIPS = str(ROOT / "assets/clips/clips.csv")
SMALL = ["--model.hidden_size=48", "--model.depth=2", "--model.num_heads=4", "--model.from_pretrained=None"]
STEPS = ["--data-path", CLIPS, "--num-workers=0", "--max-steps=2", "--ckpt-every=0", "--log-every=1"]
SIZE = ["--num-frames=4", "--image-size", "32", "32", "--batch-size=2"]
SAMPLES = ["--scheduler.num_sampling_steps=2", "--batch-size=1"]
BUCKETS = ["--bucket-config", "{'144p': {1: (0.5, 2), 8: (1.0, 1)}, '256': {8: (0.0, None)}}"]
TEMPORAL = "dict(type='VAE_Temporal', filters=8, num_res_blocks=1, channel_multipliers=(1, 1, 1), temporal_downsample=(True, True), num_groups=4)"
TRAINED = {
    "1.0/opensora/train/16x256x256": SIZE,
    "1.0/opensora/train/64x512x512-sp": [*SIZE, "--sp-size=1"],
    "1.1/opensora-v1-1/train/stage1": BUCKETS,
    "1.1/opensora/train/16x256x256-spee": SIZE,
    "1.2/opensora-v1-2/train/stage1": BUCKETS,
    "1.2/opensora-v1-2/misc/feat": BUCKETS,
    "1.2/opensora-v1-1/train/image_rflow": ["--image-size", "32", "32", "--batch-size=2"],
}
SAMPLED = {
    "1.0/opensora/inference/16x256x256": [*SIZE[:4], "--end-index=2"],
    "1.1/latte/inference/16x256x256-class": [*SIZE[:4], "--end-index=2"],
    "1.2/dit/inference/1x256x256-class": ["--image-size", "32", "32", "--end-index=2"],
    "1.2/pixart/inference/1x1024MS": ["--image-size", "64", "32", "--end-index=2"],
    "1.1/opensora-v1-1/inference/sample-ref": ["--image-size", "32", "48", "--prompt", "a dog", "the sky"],
    "1.2/opensora-v1-2/inference/sample": ["--image-size", "32", "48", "--prompt"],
}


@pytest.fixture
def run(tmp_path, monkeypatch, toy_encoders):
    """Run a script on a file; model, VAE and text encoder are small, nothing else is changed."""
    image = f"dict(type='VideoAutoencoderKL', from_pretrained={str(toy_encoders['vae'])!r})"
    text = f"dict(type='hf', from_pretrained={str(toy_encoders['text'])!r}, model_max_length=12)"
    pipeline = f"dict(type='OpenSoraVAE_V1_2', micro_frame_size=17, vae_2d={image}, vae_temporal={TEMPORAL})"

    def run(script: str, name: str, *options: str) -> None:
        facts = all_files()[name]
        vae = facts["model"] if "/vae/" in name else facts["vae"]
        parts = ["--device=cpu", "--dtype=fp32", "--seed=1"]
        if vae["type"] == "VideoAutoencoderPipeline":
            parts += ["--vae.vae_2d", image, "--vae.vae_temporal", TEMPORAL]
        else:
            parts += ["--vae", pipeline if vae["type"] == "OpenSoraVAE_V1_2" else image]
        if facts.get("text_encoder", {}).get("type", "classes") != "classes":
            parts += ["--text-encoder", text]
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [script, write(facts, tmp_path / "original.py"), *parts, *options])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


def losses(folder: Path) -> list[float]:
    """Of the only run in a folder."""
    (metrics,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_file_trains(run, tmp_path, name):
    run("scripts/train.py", name, *SMALL, *STEPS, "--plugin=ddp", f"--outputs={tmp_path}", *TRAINED[name])
    assert len(losses(tmp_path)) == 2
    assert all(map(math.isfinite, losses(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_a_file_samples(run, tmp_path, name, caplog):
    options = [*SMALL, *SAMPLES, f"--save-dir={tmp_path / 'samples'}", *SAMPLED[name]]
    if options[-1] == "--prompt":  # the first has a reference, the second none
        reference = {"reference_path": str(ROOT / "assets/clips/white_dog.mp4"), "mask_strategy": "0"}
        options += [f"a dog{json.dumps(reference)}", "the sky"]
    if "sample-ref" in name:
        options += [
            "--reference-path",
            str(ROOT / "assets/clips/white_dog.mp4"),
            "None",
            "--mask-strategy",
            "0",
            "None",
        ]
    run("scripts/inference.py", name, *options)
    made = [path for path in (tmp_path / "samples").iterdir() if path.suffix in (".mp4", ".png")]
    assert len(made) == 2
    assert ("condition_frame_length=5 has no effect" in caplog.text) == ("v1-2" in name)


@pytest.mark.slow
def test_a_file_trains_and_shows_a_vae(run, tmp_path, capsys):
    size = ["--image-size", "32", "32", "--num-frames=9", "--mixed-lengths", "9", "9", "1", "--loss.lpips=0"]
    run("scripts/train_vae.py", "1.2/vae/train/stage1", *STEPS, f"--outputs={tmp_path}", *size)
    assert all(map(math.isfinite, losses(tmp_path)))
    shown = ["--data-path", CLIPS, "--num-samples=2", "--image-size", "32", "32", f"--save-dir={tmp_path / 'shown'}"]
    run("scripts/inference_vae.py", "1.2/vae/inference/video", *shown)
    assert capsys.readouterr().out.count("PSNR") == 2
    assert len(list((tmp_path / "shown").glob("*.mp4"))) == 2
