"""Sidecars: the file next to a sample, how a finished one is known, and that a batch can go on where it stopped."""

import json
import logging
import os
import resource
from pathlib import Path

import pytest
import torch

from opensora.checkpoint.load import save_checkpoint
from opensora.config.load import InferenceConfig, config_from_dict
from opensora.inference.jobs import jobs, records
from opensora.inference.manifest import (
    already_made,
    content_hash,
    describe_checkpoint,
    finished,
    frames_hash,
    inputs_of,
    read_sidecar,
    sidecar,
    write_samples,
    write_sidecar,
)
from opensora.inference.output import save_sample, with_extension
from opensora.inference.sizes import VideoSize
from opensora.utils.errors import UserError

CONFIG = {
    "seed": 42,
    "image_size": (64, 64),
    "num_frames": 1,
    "fps": 24,
    "model": {"type": "STDiT", "patch_size": (1, 2, 2)},
    "save_dir": "a",
    "verbose": 1,
}


def record(**changes):
    config = CONFIG | {key: value for key, value in changes.items() if key in CONFIG}
    rest = {key: value for key, value in changes.items() if key not in CONFIG}
    fields = {"prompt": "p", "prompt_index": 3, "sample_index": 0, "save_fps": 23.976, "checkpoint": None, "inputs": {}}
    return sidecar(config, **(fields | {"made_with": {"git_commit": "abc", "versions": {}}} | rest))


def test_sidecar_is_read_back_as_written(tmp_path):
    path = write_sidecar(record(prompt="平静\n的湖"), tmp_path / "s_0.5")
    assert path.name == "s_0.5.json"
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert loaded == record(prompt="平静\n的湖")
    assert loaded["save_fps"] == "24000/1001"
    assert loaded["config"]["image_size"] == [64, 64]


def test_finished_samples_are_recognised_and_never_overwritten(tmp_path):
    path = tmp_path / "sample"
    assert not already_made(path, record())
    write_sidecar(record(seed=1), path)  # a run that was stopped before its video was there
    assert not already_made(path, record())
    write_sidecar(record(), path)
    save_sample(torch.zeros(3, 1, 8, 8), path, fps=8)
    assert already_made(path, record())
    assert already_made(path, record(save_dir="b", verbose=0, made_with={"git_commit": "def"}))
    for change in ({"seed": 1}, {"prompt": "q"}, {"model": {"type": "DiT"}}, {"checkpoint": {"path": "w"}}):
        with pytest.raises(UserError, match=f"other settings .*{next(iter(change))}"):
            already_made(path, record(**change))
    for foreign in ("{}", "not json", "[1]"):
        with_extension(path, ".json").write_text(foreign)
        with pytest.raises(UserError, match="does not show"):
            already_made(path, record())
    with_extension(path, ".json").unlink()
    with pytest.raises(UserError, match="delete the file"):
        already_made(path, record())


def test_checkpoint_is_described(tmp_path):
    assert describe_checkpoint(None) is None
    assert describe_checkpoint(tmp_path / "missing") == {
        "path": str(tmp_path / "missing"),
        "changed": None,
        "step": None,
        "git_commit": None,
    }
    (tmp_path / "manifest.json").write_text('{"step": 1500, "git_commit": "abc", "files": {}}')
    assert describe_checkpoint(tmp_path)["step"] == 1500
    assert describe_checkpoint(tmp_path)["changed"] is not None
    (tmp_path / "manifest.json").write_text('{"step": 1500, "gi')
    with pytest.raises(UserError, match=r"manifest.json is no valid JSON .*Name another checkpoint"):
        describe_checkpoint(tmp_path)


def test_an_older_sidecar_without_a_field_counts_as_its_default(tmp_path):
    path = tmp_path / "sample"
    write_sidecar(record(), path)  # CONFIG is of a version that had few fields
    save_sample(torch.zeros(3, 1, 8, 8), path, fps=8)
    now = {**record(), "config": {**record()["config"], "save_format": "mp4", "loop": 1}}
    assert already_made(path, now)
    now["config"]["loop"] = 3
    with pytest.raises(UserError, match=r"other settings \(loop was .*, now"):
        already_made(path, now)


def test_an_older_spelling_in_a_sidecar_is_the_same_setting(tmp_path):
    def with_shift(**shift):
        return {**record(), "config": {**record()["config"], "scheduler": {"type": "rflow", **shift}}}

    path = tmp_path / "sample"
    write_sidecar(with_shift(use_timestep_transform=True), path)
    save_sample(torch.zeros(3, 1, 8, 8), path, fps=8)
    assert already_made(path, with_shift(shift="resolution"))
    with pytest.raises(UserError, match=r"scheduler\.shift was resolution, now none"):
        already_made(path, with_shift(shift="none"))


def run_from(tmp_path, **changes):
    """The only record of a run in a folder of files."""
    for name in ("first.png", "ref.png", "adapter/weights", "vae/weights", "inner/weights", "text/weights"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    part = {"from_pretrained": str(tmp_path / "inner")}
    values = {
        "num_frames": 4,
        "fps": 8,
        "image_size": (32, 32),
        "prompt": ["a"],
        "model": {"type": "STDiT"},
        "vae": {"type": "OpenSoraVAE_V1_2", "from_pretrained": str(tmp_path / "vae"), "vae_2d": part},
        "text_encoder": {"type": "hf", "from_pretrained": str(tmp_path / "text")},
        "scheduler": {"type": "iddpm"},
        "lora": str(tmp_path / "adapter"),
        "save_dir": str(tmp_path / "made"),
    }
    cfg = config_from_dict(InferenceConfig, {**values, **changes})
    return lambda: next(records(cfg, jobs(cfg), VideoSize(4, (32, 32), 8.0, 8.0)))


@pytest.mark.parametrize("how", ["image", "reference_path"])
def test_a_reference_whose_content_has_changed_is_reported(tmp_path, how):
    path, ref = tmp_path / "made" / "sample_0000", str(tmp_path / "ref.png")
    given = (
        {"image": ref}
        if how == "image"
        else {"reference_path": [f"{ref};http://x/a.png"], "mask_strategy": ["0;0,1,0,-1"]}
    )
    record = run_from(tmp_path, **given)
    before = record()
    assert list(before["inputs"]["references"]) == [ref]  # an address is known by its name
    write_sidecar(before, path)
    save_sample(torch.zeros(3, 2, 8, 8), path, fps=8)
    os.utime(ref)
    assert already_made(path, record())
    Path(ref).write_text("after!")  # as many bytes
    os.utime(ref, (1, 1))
    with pytest.raises(UserError, match=r"other settings \(inputs.references.*ref.png was \w{16}, now \w{16}"):
        already_made(path, record())


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("adapter", "lora"),
        ("vae", "vae.from_pretrained"),
        ("inner", "vae.vae_2d.from_pretrained"),
        ("text", "text_encoder.from_pretrained"),
    ],
)
def test_weights_that_have_changed_are_reported(tmp_path, folder, name):
    path, record = tmp_path / "made" / "sample_0000", run_from(tmp_path)
    write_sidecar(record(), path)
    save_sample(torch.zeros(3, 2, 8, 8), path, fps=8)
    assert already_made(path, record())
    os.utime(tmp_path / folder / "weights", (1, 1))
    with pytest.raises(
        UserError, match=rf"other settings \(inputs.weights.{name}.changed was 2\d+-.*, now 1970"
    ) as reported:
        already_made(path, record())
    assert reported.value.args[0].count(", now ") == 1


def test_each_of_several_loras_is_known(tmp_path):
    """Of a run its newest checkpoint, which is another later on."""
    for step in (1, 2):
        save_checkpoint(tmp_path / "run" / f"step{step}", {"model": {}}, state={}, manifest={"step": step})
        weights = inputs_of({"lora": {"high": str(tmp_path / "run"), "low": ["owner/name"]}}, [])["weights"]
        assert weights["lora.0"]["path"] == str(tmp_path / "run" / f"step{step}")
        assert weights["lora.1"] == {"path": "owner/name", "changed": None, "step": None, "git_commit": None}


def test_an_older_sidecar_that_does_not_know_its_inputs_counts_as_made_from_the_same(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path, record = tmp_path / "made" / "sample_0000", run_from(tmp_path, image=str(tmp_path / "first.png"))()
    old = {name: value for name, value in record.items() if name != "inputs"}
    write_sidecar(old, path)
    save_sample(torch.zeros(3, 2, 8, 8), path, fps=8)
    assert already_made(path, record)
    assert (
        "sample_0000.json: an older version wrote it, so that references, adapter, VAE and text encoder count"
        in caplog.text
    )


def test_what_is_no_file_has_no_hash(tmp_path):
    assert content_hash(tmp_path / "nowhere.png") is None
    parts = {"model": {"from_pretrained": "w"}, "vae": {"from_pretrained": "owner/name"}, "text_encoder": {}}
    assert inputs_of(parts, []) == {
        "references": {},
        "weights": {
            "vae.from_pretrained": {"path": "owner/name", "changed": None, "step": None, "git_commit": None},
        },
    }


@pytest.mark.parametrize("save_format", ["webm", "gif"])
def test_a_finished_sample_of_another_format_is_known(tmp_path, save_format):
    path = tmp_path / "sample"
    write_sidecar(record(), path)
    save_sample(torch.zeros(3, 2, 8, 8), path, fps=8, save_format=save_format)
    assert already_made(path, record())


def test_a_batch_is_written_with_what_makes_it_again(tmp_path):
    videos = torch.rand(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    records = [record(prompt="a", prompt_index=0), record(prompt="b", prompt_index=1, sample_index=2)]
    files = write_samples(videos, [tmp_path / "a", tmp_path / "b"], records, device="cpu", save_format="webm")
    assert [file.name for file in files] == ["a.webm", "b.webm"]
    b = read_sidecar(tmp_path / "b.json")
    assert b["place"] == 1
    nothing = {"reference_path": None, "mask_strategy": None, "negative_prompt": None}
    assert b["batch"] == [
        {"prompt": "a", "prompt_index": 0, "sample_index": 0, "seed": 42, **nothing},
        {"prompt": "b", "prompt_index": 1, "sample_index": 2, "seed": 42, **nothing},
    ]
    assert b["frames"] == frames_hash(videos[1]) != frames_hash(videos[0])
    assert b["hardware"]["threads"] == torch.get_num_threads()
    assert all(already_made(tmp_path / name, r) for name, r in zip("ab", records, strict=True))


@pytest.mark.parametrize("num_frames", [1, 4])
def test_a_file_that_cannot_be_written_is_named(tmp_path, num_frames):
    """As on a disk that fills: here the process may write no files of more than some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    video = torch.rand(3, num_frames, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        with pytest.raises(UserError, match=r"sample_7: the sample cannot be written \(.*the same command goes on"):
            write_samples([video], [tmp_path / "sample_7"], [record()], device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("*.mp4")) + list(tmp_path.glob("*.png"))


def test_two_runs_in_one_folder_do_not_mix_their_samples(tmp_path, caplog):
    """Both have seen that there is no sample yet."""
    video, path = torch.zeros(3, 4, 8, 8), tmp_path / "sample"
    write_samples([video], [path], [record(seed=1)], device="cpu")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"sample.mp4 exists and was made with other settings \(seed was 1, now 2"):
        write_samples([video + 0.5], [path], [record(seed=2)], device="cpu")
    assert write_samples([video], [path], [record(seed=1)], device="cpu") == [tmp_path / "sample.mp4"]
    assert "another run has made it meanwhile" in caplog.text
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_run_that_was_killed_goes_on_with_what_is_missing(tmp_path):
    names = [tmp_path / f"sample_{i}" for i in range(5)]
    records = [record(prompt=str(i), prompt_index=i) for i in range(5)]
    good, bad = torch.zeros(3, 4, 8, 8), torch.full((3, 4, 8, 8), float("nan"))

    def run(videos) -> list[str]:
        todo = [i for i in range(5) if not already_made(names[i], records[i])]
        for i in todo:
            write_samples([videos[i]], [names[i]], [records[i]], device="cpu")
        return [names[i].name for i in todo]

    with pytest.raises(ValueError, match="not finite"):
        run([good, good, bad, good, good])  # stops in the third
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "sample_0.json", "sample_0.mp4", "sample_1.json", "sample_1.mp4",
    ]  # fmt: skip
    write_sidecar(records[2], names[2])  # stopped between the sidecar and its video
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.mp4")}
    assert run([good] * 5) == ["sample_2", "sample_3", "sample_4"]
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert run([good] * 5) == []
    assert [sample.path.name for sample in finished(tmp_path)] == [f"sample_{i}.mp4" for i in range(5)]


def test_what_is_no_sidecar(tmp_path):
    (tmp_path / "scores.json").write_text('{"fid": 3}')
    (tmp_path / "scores.png").write_text("")
    write_sidecar(record(), tmp_path / "unfinished")
    assert list(finished(tmp_path)) == []
    with pytest.raises(UserError, match="no sidecar"):
        read_sidecar(tmp_path / "scores.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_sidecar(tmp_path / "nowhere.json")
