"""`python -m tools.finetune FOLDER`: odd clips to samples, by commands as they are typed; interruption, continuation, refusals."""

import importlib
import json
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from opensora.checkpoint.load import complete_checkpoints
from opensora.config.load import TrainConfig, parse_config
from opensora.utils.errors import UserError
from tests.scripts.conftest import toy_encoders
from tools import finetune
from tools.datasets.convert import run as convert

__all__ = ["toy_encoders"]
ROOT = Path(__file__).parents[2]


def write_clip(path: Path, frames: int, height: int, width: int, rate: int = 12, codec: str = "libx264") -> None:
    noise = np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv444p" if codec == "libx264" else "yuv420p"
        for pixels in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """A folder as users have them."""
    folder = tmp_path_factory.mktemp("clips") / "my clips"
    folder.mkdir()
    write_clip(folder / "landscape clip.mp4", 12, 24, 48)
    write_clip(folder / "Straße.mp4", 10, 48, 26, rate=30)
    write_clip(folder / "odd.mp4", 9, 33, 41, rate=60)
    write_clip(folder / "web.webm", 8, 32, 32, codec="libvpx")
    write_clip(folder / "short.mp4", 2, 32, 32)
    write_clip(folder / "empty caption.mp4", 8, 32, 32)
    images = [Image.new("RGB", (30, 20), (40 * i, 90, 200)) for i in range(6)]
    images[0].save(folder / "moving.gif", save_all=True, append_images=images[1:], duration=100)
    images[0].save(folder / "still.png")
    whole = (folder / "landscape clip.mp4").read_bytes()
    (folder / "damaged.mp4").write_bytes(whole[: len(whole) // 2])
    captions = {"landscape clip": 'a dog, called "Rex", runs', "Straße": "a grey street", "empty caption": " "}
    for path in folder.iterdir():
        (folder / f"{path.stem}.txt").write_text(captions.get(path.stem, f"the {path.stem}"))
    return folder


@pytest.fixture
def config(toy_encoders, tmp_path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(
        f'''"""Toy."""
num_frames = 2
frame_interval = 2
image_size = (16, 24)
dataset = dict(short_clips="drop")
num_workers = 0
dtype = "fp32"
device = "cpu"
model = dict(type="STDiT-XXS/2", depth=2)
vae = dict(type="VideoAutoencoderKL", from_pretrained={str(toy_encoders["vae"])!r})
text_encoder = dict(type="hf", from_pretrained={str(toy_encoders["text"])!r}, model_max_length=12)
scheduler = dict(type="iddpm")
val_scheduler = dict(type="iddpm", num_sampling_steps=2, cfg_scale=1.0)
epochs = 100
max_steps = 2
log_every = 1
batch_size = 2
'''
    )
    return path


@pytest.fixture
def typed(monkeypatch) -> Callable[..., list[str]]:
    """`typed(folder, *options)` runs the tool, and its commands in this process -> these, as they were printed."""

    def here(program: str, *arguments: str, accepted: tuple[int, ...] = (0,)) -> None:
        done.append(shlex.join(finetune.typed(program, arguments)))
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        try:
            if program.startswith("scripts."):
                runpy.run_path(str(ROOT / f"{program.replace('.', '/')}.py"), run_name="__main__")
            else:
                importlib.import_module(program).main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        assert code in accepted, program

    def run(folder: Path, *options: object) -> list[str]:
        done.clear()
        monkeypatch.setattr(sys, "argv", ["finetune.py", str(folder), *map(str, options)])
        finetune.main()
        return list(done)

    done: list[str] = []
    monkeypatch.setattr(finetune, "command", here)
    return run


@pytest.mark.slow
def test_from_odd_clips_to_samples_and_on(clips, config, tmp_path, typed, capfd):
    out, trained = tmp_path / "out put", ["Straße.mp4", "landscape clip.mp4", "moving.gif", "odd.mp4", "web.webm"]
    options = ("--model", config, "--out", out, "--lr", "1e-4")
    lines = typed(clips, *options)
    told = capfd.readouterr()
    assert re.search(r"left out: .*empty caption.mp4: it has no caption\n", told.out)
    assert re.search(r"left out: .*damaged.mp4", told.out)
    assert re.search(r"1 of 7 rows are dropped: they are images, which cannot give 2 frames \(.*still.png\)", told.err)
    assert re.search(r"they are shorter than the 3 frames .*short.mp4", told.err)
    table = pd.read_csv(out / "clips.csv")
    assert [Path(path).name for path in table["path"]] == sorted([*trained, "short.mp4", "still.png"])
    assert table["text"][1] == 'a dog, called "Rex", runs'
    assert (out / "clips.png").is_file()
    assert [line.split()[1] for line in lines] == ["-m", "-m", "-m", "scripts/train.py", "scripts/inference.py"]
    assert "--lr 1e-4" in lines[3]
    assert "--load" not in lines[3]
    assert "CachedVideoTextDataset" in lines[3]
    samples = pd.read_csv(out / "prompts.csv")["text"].tolist()
    assert samples == ["a grey street", 'a dog, called "Rex", runs', "the moving", "the odd", "the web"]
    assert len(list((out / "samples-step2").glob("*.mp4"))) == 5
    manifest = json.loads((complete_checkpoints(out / "run")[-1] / "manifest.json").read_text())
    assert manifest["config"]["lr"] == 1e-4
    for name in ("clips.csv, 5 of its 7 rows trained on", "clips.png", "samples-step2.png", "global_step2"):
        assert name in told.out
        assert name.startswith(("clips.csv", "global")) or (out / name).is_file()

    # a clip more, two steps more, another prompt
    (clips / "empty caption.txt").write_text("a box")
    lines = typed(clips, *options, "--steps", 3, "--prompt", "a cup")
    (clips / "empty caption.txt").write_text(" ")
    assert "--load=latest" in lines[3]
    assert [path.name[-5:] for path in complete_checkpoints(out / "run")] == ["step2", "step3"]
    assert [path.name[:6] for path in (out / "samples-step3").glob("*.mp4")] == ["a-cup-"]
    assert (out / "samples-step3.png").is_file()

    # done: nothing is trained again
    capfd.readouterr()
    finetune.train(parse_config(TrainConfig, argv=[str(config), "--data-path=x"]), out / "run", [])
    assert "has 3 steps already; a larger --steps trains further" in capfd.readouterr().out


def test_it_stops_where_it_is_told(clips, config, tmp_path, typed, capsys):
    lines = typed(clips, "--model", config, "--out", tmp_path / "o", "--stop-after", "table")
    assert [line.split()[2] for line in lines] == ["tools.datasets.convert"]
    assert "stopped after table" in capsys.readouterr().out


def test_buckets_are_cached_and_lora_is_an_option(clips, config, tmp_path, monkeypatch, capsys):
    done: list[str] = []
    monkeypatch.setattr(finetune, "command", lambda *words, accepted=(0,): done.append(" ".join(words)))
    buckets = [
        "--bucket-config",
        "{'32px': {1: (1.0, 2), 4: (1.0, 1)}}",
        "--dataset",
        "dict(type='VariableVideoTextDataset')",
    ]
    config.write_text(re.sub(r"num_frames = 2|image_size.*|dataset = .*", "", config.read_text()))
    weights = ["--model.from_pretrained", str(tmp_path)]
    words = ["f", str(clips), "--model", str(config), "--out", str(tmp_path / "o"), "--lora", *buckets, *weights]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exit_:
        finetune.main()
    assert exit_.value.code == 130  # nothing was trained by the commands of this test
    programs = ["tools.datasets.convert", "tools.datasets.doctor", "tools.cache_features", "scripts.train"]
    assert [line.split()[0] for line in done] == programs
    assert done[2].endswith("--epochs=4")
    assert "--lora.rank=16" in done[3]
    assert "CachedVariableVideoTextDataset" in done[3]
    out = capsys.readouterr().out
    assert "stopped at step 0 of 2; the same command goes on" in out


@pytest.mark.slow
def test_a_folder_is_trained_on_from_cached_buckets(clips, config, tmp_path, typed):
    config.write_text(re.sub(r"num_frames = 2|image_size.*|dataset = .*|batch_size.*", "", config.read_text()))
    buckets = "{'32x48': {4: (1.0, 1)}, '16x24,24x16': {4: (1.0, 2), 2: (1.0, 2), 1: (1.0, 2)}}"
    kind = "--dataset=dict(type='VariableVideoTextDataset')"
    options = ("--model", config, "--out", tmp_path / "o", "--stop-after", "train", "--bucket-config", buckets, kind)
    assert "tools.cache_features" in typed(clips, *options)[2]
    assert complete_checkpoints(tmp_path / "o" / "run")
    assert json.loads((tmp_path / "o" / "run" / "config.json").read_text())["dataset"]["type"].startswith(
        "CachedVariable"
    )


def test_conditioning_frames_that_are_drawn_are_not_cached(config):
    config.write_text(re.sub(r"num_frames = 2|image_size.*|dataset = .*|batch_size.*", "", config.read_text()))
    wan = ["--model=dict(type='Wan', condition_channels=8)", "--dataset=dict(type='VariableVideoTextDataset')"]
    argv = [str(config), *wan, "--data-path=x.csv", "--bucket-config={'32px': {5: (1.0, 2)}}"]
    kinds = {"image_head": "CachedVariableVideoTextDataset", "random": None}
    for kind, expected in kinds.items():
        cfg = parse_config(TrainConfig, finetune.REGISTRIES, [*argv, f"--mask-ratios={{'{kind}': 1.0}}"])
        assert finetune.cached_type(cfg) == expected


def refused(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["finetune", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        finetune.main()
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_what_is_wrong_is_told_before_anything_is_done(clips, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "command", None)
    out = tmp_path / "out"
    options = ("--model", config, "--out", out)
    assert "nowhere does not exist; name a folder of clips, before the options" in refused(
        monkeypatch, capsys, "nowhere"
    )
    assert "is a file; name a folder of clips, before the options. A table" in refused(monkeypatch, capsys, config)
    assert "--larning-rate is not a field" in refused(monkeypatch, capsys, clips, *options, "--larning-rate", "1")
    assert "smal.py does not exist. Did you mean 'small.py'" in refused(monkeypatch, capsys, clips, "--model", "smal")
    other = refused(monkeypatch, capsys, clips, "--model", "configs/quickstart/train.py", "--out", out)
    assert "reads a CachedVideoTextDataset, not clips" in other
    assert not out.exists()
    config.write_text(config.read_text().replace("max_steps = 2\n", ""))
    assert "does not say when training ends: add --steps N" in refused(monkeypatch, capsys, clips, *options)
    out.mkdir()
    finetune.claim(out, {"folder": "/elsewhere", "model": str(config), "lora": False})
    other = refused(monkeypatch, capsys, clips, *options, "--steps", 1)
    assert re.search(r"holds another fine-tuning: folder was /elsewhere, now .*my clips\. Name another --out", other)


def test_captions_are_given_for_all_or_refused(tmp_path, capsys):
    write_clip(tmp_path / "a.mp4", 3, 32, 32)
    write_clip(tmp_path / "b.mp4", 3, 32, 32)
    (tmp_path / "b.txt").write_text("own")
    table = tmp_path / "t.csv"
    convert(["captioned", str(tmp_path), "--output", str(table), "--caption", "one for all"])
    assert pd.read_csv(table)["text"].tolist() == ["one for all", "own"]
    assert "left out" not in capsys.readouterr().out
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"no file is left\. A caption is in .*clip\.txt.*--caption TEXT"):
        convert(["captioned", str(tmp_path), "--output", str(table), "--overwrite"])


def test_commands_are_printed_as_they_can_be_typed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["opensora finetune", "clips"])
    assert shlex.join(finetune.typed("scripts.train", ["a b.py"])) == "opensora train 'a b.py'"
    assert finetune.typed("tools.cache_features", ["c.py"]) == ["opensora", "run", "tools.cache_features", "c.py"]
    monkeypatch.setattr(sys, "argv", ["finetune.py", "clips"])
    assert finetune.typed("scripts.train", ["c.py"]) == ["python", "scripts/train.py", "c.py"]
    assert finetune.typed("tools.cache_features", ["c.py"]) == ["python", "-m", "tools.cache_features", "c.py"]


def test_a_command_that_fails_ends_it_and_ctrl_c_is_left_to_the_command(tmp_path, monkeypatch, capsys):
    """The parts that run are two lines of Python each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    finetune.command("ends", "1", accepted=(0, 1))
    with pytest.raises(SystemExit) as exit_:
        finetune.command("ends", "3")
    assert exit_.value.code == 3
    assert "$ python -m ends 3" in capsys.readouterr().out
    # both get the signal, as from a terminal; the command takes its time
    (tmp_path / "waits.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGINT, lambda *_: None)\n"
        "os.kill(os.getppid(), signal.SIGINT); time.sleep(0.3); open('done', 'w')"
    )
    finetune.command("waits")
    assert (tmp_path / "done").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_model_that_makes_videos_from_images_samples_from_those_of_the_clips(
    clips, config, tmp_path, monkeypatch, capsys
):
    done: list[list[str]] = []
    table = tmp_path / "clips.csv"
    pd.DataFrame({"path": [clips / "odd.mp4"], "text": ["the odd"]}).to_csv(table, index=False)
    monkeypatch.setattr(finetune, "command", lambda *words: done.append([*words]))
    monkeypatch.setattr(finetune, "complete_checkpoints", lambda run: [run / "epoch0-global_step2"])
    wan = "--model.type=Wan2.1-FLF2V-14B"
    argv = [str(config), wan, f"--data-path={table}", "--frame-interval=1"]
    cfg = parse_config(TrainConfig, finetune.REGISTRIES, argv)
    with pytest.raises(StopIteration):  # this command made nothing
        finetune.sample(cfg, tmp_path, None)
    (row,) = pd.read_csv(tmp_path / "prompts.csv").to_dict("records")
    assert row == {"text": "the odd", "reference_path": str(clips / "odd.mp4"), "mask_strategy": "0;0,0,-1,-1"}
    words = (clips, "--model", config, "--out", tmp_path / "o", "--prompt", "a cup", wan)
    assert "makes videos from images" in refused(monkeypatch, capsys, *words)
