"""A sample is made again from its sidecar, bit for bit: its batch, references, negative prompt and seed with it."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.acceleration.cfg_parallel import ParallelPlan
from opensora.inference.jobs import batches, differences, jobs, records, remake, request_of
from opensora.inference.manifest import frames_hash, read_sidecar, write_samples
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.sizes import stated_size
from opensora.utils.errors import UserError
from tools import remake as tool


def sample(cfg) -> dict[str, torch.Tensor]:
    """What scripts/inference.py does: the videos by name, and their files in cfg.save_dir."""
    pipeline = VideoPipeline.from_config(cfg, plan=ParallelPlan())
    videos = {}
    for batch in batches(jobs(cfg), cfg.batch_size):
        made = pipeline.sample(request_of(cfg, batch, pipeline)).video
        rows = list(records(cfg, batch, pipeline.defaults))
        write_samples(list(made), [job.path for job in batch], rows, device="cpu", save_format=cfg.save_format)
        videos |= {job.path.name: video for job, video in zip(batch, made, strict=True)}
    return videos


def again(cfg, name: str) -> torch.Tensor:
    return remake(read_sidecar(f"{cfg.save_dir}/{name}.json"))


def test_each_sample_of_a_batch(cfg, tmp_path):
    cfg = replace(
        cfg,
        prompt=["a white dog", 'a city at night {"seed": 7}', "three"],
        negative_prompt=["blur"],
        batch_size=3,
        num_sample=2,
        save_dir=str(tmp_path),
        save_format="webm",
    )
    videos = sample(cfg)
    assert len(videos) == 6
    for name in ("sample_0000-1", "sample_0001-0"):
        assert torch.equal(again(cfg, name), videos[name])
    record = read_sidecar(tmp_path / "sample_0001-0.json")
    assert record["frames"] == frames_hash(videos["sample_0001-0"])
    assert record["seed"] == 7
    assert differences(record, "cpu") == []


def test_a_sample_that_starts_from_an_image(cfg, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "first.png")
    cfg = replace(cfg, prompt=["a", "b"], image=str(tmp_path / "first.png"), batch_size=2, save_dir=str(tmp_path / "s"))
    videos = sample(cfg)
    assert torch.equal(again(cfg, "sample_0001"), videos["sample_0001"])


def test_a_folder_that_is_none_is_reported_before_sampling(cfg, tmp_path, monkeypatch, capsys):
    cfg = replace(cfg, prompt=["a"], save_dir=str(tmp_path / "s"))
    sample(cfg)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(tool, "remake", lambda *_, **__: pytest.fail("it sampled"))
    monkeypatch.setattr(
        sys, "argv", ["remake", str(tmp_path / "s" / "sample_0000.json"), "--out", str(tmp_path / "taken")]
    )
    with pytest.raises(SystemExit):
        tool.main()
    assert "no files can be written there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"batch": 3, "place": "0"}, r"sample_0000\.json has another type of batch, place than"),
        ({"inputs": {"references": 3}}, r"another type of inputs\.references than"),
        ({"save_fps": "fast"}, r"sample_0000\.json is no sidecar of a sample"),
        ({"batch": [{}]}, r"does not describe its batch \(KeyError\('reference_path'\)\)"),
        ({"place": 1}, r"does not describe its batch \(IndexError"),
    ],
)
def test_a_sidecar_edited_by_hand_is_refused_before_anything_is_loaded(cfg, tmp_path, edit, message):
    cfg = replace(
        cfg, prompt=["a"], model={"type": "STDiT", "from_pretrained": "gone.safetensors"}, save_dir=str(tmp_path)
    )
    (row,) = records(cfg, jobs(cfg), stated_size(cfg))
    (path,) = write_samples([torch.zeros(3, 1, 8, 8)], [tmp_path / "sample_0000"], [row], device="cpu")
    path = path.with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(UserError, match=message):
        remake(read_sidecar(path))


def test_the_command_says_whether_the_frames_are_the_same(cfg, tmp_path, monkeypatch, capsys):
    cfg = replace(cfg, prompt=["a white dog"], save_dir=str(tmp_path / "made"))
    sample(cfg)
    path, out = tmp_path / "made" / "sample_0000.json", tmp_path / "again"

    def run() -> int:
        monkeypatch.setattr(sys, "argv", ["remake", str(path), "--out", str(out)])
        with pytest.raises(SystemExit) as stop:
            tool.main()
        return stop.value.code

    assert run() == 0
    assert "again/sample_0000.mp4: the same frames bit for bit" in capsys.readouterr().out
    assert (out / "sample_0000.mp4").read_bytes() == (tmp_path / "made" / "sample_0000.mp4").read_bytes()

    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "seed": 43, "config": {**record["config"], "seed": 43}} | {"batch": [{**record["batch"][0], "seed": 43}]}))  # fmt: skip
    assert run() == 1
    assert "DIFFER" in capsys.readouterr().out
    out = tmp_path / "made"
    assert run() == 2
    assert "is not to be replaced" in capsys.readouterr().err


def test_what_has_changed_since_is_reported(cfg, tmp_path):
    cfg = replace(cfg, prompt=["a"], save_dir=str(tmp_path))
    sample(cfg)
    record = read_sidecar(tmp_path / "sample_0000.json")
    old = {
        **record,
        "hardware": {"device": "another", "threads": 1},
        "versions": {**record["versions"], "torch": "1.0"},
        "checkpoint": {**record["checkpoint"], "changed": "2001-01-01T00:00:00+00:00"},
        "config": {**record["config"], "sp_size": 2},
    }
    reported = differences(old, "cpu")
    assert len(reported) == 4
    for name in ("hardware was {'device': 'another'", "torch was 1.0", "checkpoint was", "sp_size was 2, now 1"):
        assert any(name in line for line in reported)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    weights = {name: {**value, "step": 7} for name, value in record["inputs"]["weights"].items()}
    assert set(weights) == {"vae.from_pretrained", "text_encoder.from_pretrained"}
    reported = differences(
        {**record, "inputs": {"references": {str(tmp_path / "a.png"): "0"}, "weights": weights}}, "cpu"
    )
    assert [line.partition(" was ")[0] for line in reported] == [str(tmp_path / "a.png"), *weights]
    assert differences({k: v for k, v in record.items() if k != "inputs"}, "cpu") == []
    del old["batch"]
    with pytest.raises(UserError, match="older version"):
        remake(old)
