"""The doctor: what becomes of the rows, what is wrong with them, what the model sees, and an exit code that tells."""

import ast
import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.acceleration.distributed import World
from opensora.datasets import CachedVideoTextDataset, VariableVideoTextDataset, VideoTextDataset
from opensora.datasets.cache.buckets import BUCKETS, Encoder, write_buckets
from opensora.datasets.cache.moments import CLIP_FEATURES, Job, cache_settings, source_hash
from opensora.datasets.cache.records import RecordWriter
from opensora.datasets.sampler import SampleKey
from tools.datasets import doctor

CONFIG = '''"""Toy."""
dataset = dict(type="VariableVideoTextDataset")
bucket_config = {buckets}
model = dict(type="STDiT2-XL/2")
vae = dict(type="VideoAutoencoderKL")
text_encoder = dict(type="t5")
scheduler = dict(type="iddpm")
'''


@pytest.fixture
def images(tmp_path) -> Path:
    """A table of eight images of two shapes."""
    rows = []
    for i in range(8):
        size = ((96, 64), (64, 96))[i % 2]
        Image.new("RGB", size, (30 * i, 200, 90)).save(tmp_path / f"{i}.png")
        rows.append({"path": f"{i}.png", "text": f"image {i}"})
    return write(tmp_path / "images.csv", rows)


def write(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def examine(tmp_path, monkeypatch, capsys):
    """`examine(table, buckets, *options)` -> exit code, what it printed."""

    def run(table: Path, buckets: str, *options: str) -> tuple[int, str]:
        config = tmp_path / "config.py"
        config.write_text(CONFIG.format(buckets=buckets))
        monkeypatch.setattr(sys, "argv", ["doctor", str(config), f"--data-path={table}", *options])
        with pytest.raises(SystemExit) as exit_:
            doctor.main()
        out, err = capsys.readouterr()
        return exit_.value.code, out + err

    return run


GOOD = '{"64px": {1: (1.0, 2)}}'


def test_all_is_well(examine, images):
    code, out = examine(images, GOOD, "--processes", "2")
    assert code == 0
    assert "8 samples in the table" in out
    assert "64px 1x48x80" in out
    assert "an epoch: 2 steps of 4 samples; 2 batches on each of 2 processes" in out
    assert "samples/s" in out
    assert "!" not in out


def test_what_is_left_out_and_what_would_keep_it(examine, images):
    code, out = examine(images, '{"240p": {1: (1.0, 2)}, "64px": {1: (1.0, 3), 8: (1.0, 1)}}', "--bucket-tail=drop")
    assert code == 1
    assert "2 samples fill no batch and are dropped; bucket_tail='keep' would keep them" in out
    code, out = examine(images, '{"240p": {1: (1.0, 2)}}')
    assert code == 2
    assert "8 left out: too small for every resolution. The smallest is 240p, from 81792 pixels" in out
    assert "would not train" in out


def test_duplicates_empty_captions_and_broken_files(examine, images, tmp_path):
    (tmp_path / "6.png").write_bytes((tmp_path / "6.png").read_bytes()[:60])
    rows = list(csv.DictReader(images.open(newline="")))
    sizes = [{"num_frames": 1, "height": (64, 96)[i % 2], "width": (96, 64)[i % 2]} for i in range(8)]
    rows = [{**row, **sizes[i], "text": "the same" if i < 4 else row["text"]} for i, row in enumerate(rows)]
    rows[5]["text"] = ""
    rows[7] |= {"height": 640}
    table = write(tmp_path / "bad.csv", [*rows, rows[0]])
    code, out = examine(table, GOOD)
    assert code == 1
    for part in (
        "1 files are there more than once with the same caption, such as 0.png (rows 1, 9)", "1 of 9 captions in 'text' are empty", "5 rows have one caption",
        "bad.csv, row 7: ", "6.png", "row 8: height=640, but the file has 96",
    ):  # fmt: skip
        assert part in out, part


def test_one_file_by_several_names_and_with_several_captions(examine, images, tmp_path):
    rows = list(csv.DictReader(images.open(newline="")))
    rows += [{"path": "./0.png", "text": rows[0]["text"]}, {"path": str(tmp_path / "1.png"), "text": "another"}]
    rows += [{"path": "x/../2.png", "text": "a third"}, {"path": "2.png", "text": "a third"}]
    (tmp_path / "x").mkdir()
    code, out = examine(write(tmp_path / "names.csv", rows), GOOD)
    assert code == 1
    assert "! 2 files are there more than once with the same caption, such as 0.png (rows 1, 9)." in out
    assert "! 2 files have different captions in several rows, such as 1.png (rows 2, 10)." in out


def test_the_contact_sheet_shows_what_the_model_sees(examine, images, tmp_path):
    page = tmp_path / "out" / "sheet.png"
    code, out = examine(images, GOOD, f"--contact-sheet={page}", "--samples=4")
    assert code == 0
    assert "4 samples as the model sees them" in out
    pixels = np.asarray(Image.open(page)).reshape(-1, 3)
    areas = [int((pixels == (30 * i, 200, 90)).all(1).sum()) for i in range(8)]
    assert sum(area >= 48 * 80 for area in areas) == 4  # one colour each, unchanged


def test_datasets_of_one_size(examine, clips_csv, tmp_path, monkeypatch, capsys):
    config = tmp_path / "fixed.py"
    config.write_text(CONFIG.format(buckets=None).replace("VariableVideoTextDataset", "VideoTextDataset"))
    argv = [
        "doctor",
        str(config),
        f"--data-path={clips_csv}",
        "--num-frames=2",
        "--image-size",
        "32",
        "48",
        "--samples=3",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_:
        doctor.main()
    assert exit_.value.code == 0
    assert "an epoch: 21 steps of 1 samples" in capsys.readouterr().out


def run_on(config: Path, text: str, monkeypatch, capsys, *options: str) -> tuple[int, str]:
    config.write_text(text)
    monkeypatch.setattr(sys, "argv", ["doctor", str(config), *options])
    with pytest.raises(SystemExit) as exit_:
        doctor.main()
    out, err = capsys.readouterr()
    return exit_.value.code, out + err


@pytest.mark.parametrize("text_encoder", ["classes", "cached", "t5"])
def test_the_numbers_of_classes_are_shared_by_many(tmp_path, monkeypatch, capsys, text_encoder):
    for i in range(12):
        (tmp_path / "images" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * i, 0, 0)).save(tmp_path / "images" / str(i % 2) / f"{i}.png")
    encoder = {
        "classes": 'dict(type="classes", num_classes=2)',
        "cached": 'dict(type="cached", cache_dir="c", encoder=dict(type="classes", num_classes=2))',
        "t5": 'dict(type="t5")',
    }[text_encoder]
    text = CONFIG.format(buckets=None).replace("VariableVideoTextDataset", "ImageFolderDataset")
    text = text.replace('dict(type="t5")', encoder) + "num_frames = 1\nimage_size = (16, 16)\n"
    code, out = run_on(tmp_path / "c.py", text, monkeypatch, capsys, f"--data-path={tmp_path / 'images'}")
    assert "12 samples in the table" in out
    assert (code, "6 rows have one caption" in out) == ((1, True) if text_encoder == "t5" else (0, False))


def test_records_of_latents_have_no_table(tmp_path, monkeypatch, capsys):
    features = {"moments": "tensor", "caption": "string", "text": "string", "shape": ["int64"], "flow": "float64"}
    with RecordWriter(tmp_path / "records", features) as writer:
        for i in range(3):
            moments = torch.randn(8, 3, 4, 4)
            writer.write({"moments": moments, "caption": f"{i}", "text": "", "shape": moments.shape, "flow": 1.0})
    text = CONFIG.format(buckets=None).replace("VariableVideoTextDataset", "RecordVideoTextDataset")
    options = (f"--data-path={tmp_path / 'records'}", "--num-frames=9", "--image-size", "32", "32")
    code, out = run_on(tmp_path / "c.py", text, monkeypatch, capsys, *options)
    assert code == 0, out
    assert "an epoch: 3 steps of 1 samples" in out
    assert "3 samples; each of num_workers" in out


def test_clips_that_a_cache_stands_for_may_be_gone(tmp_path, monkeypatch, capsys):
    write(tmp_path / "clips.csv", [{"path": "gone.png", "text": "a"}])
    features, settings = CLIP_FEATURES, cache_settings("any", (16, 16), "center", "fp16")
    with RecordWriter(tmp_path / "cache" / "clips", features, settings=settings) as writer:
        writer.write({"moments": torch.zeros(8, 1, 2, 2), "source": "1-a", "num_frames": 1, "fps": 120.0}, "gone.png")
    text = CONFIG.format(buckets=None).replace("VariableVideoTextDataset", "CachedVideoTextDataset")
    options = (f"--data-path={tmp_path / 'clips.csv'}", f"--dataset.cache_dir={tmp_path / 'cache'}", "--num-frames=1")
    code, out = run_on(tmp_path / "c.py", text, monkeypatch, capsys, *options, "--image-size", "16", "16")
    assert code == 0, out


def test_a_cache_is_drawn_from_its_files(images, tmp_path, monkeypatch, capsys):
    buckets = "{'64px': {1: (1.0, 2)}}"
    one = Encoder(lambda video: {"moments": video[0, :, :, ::8, ::8]}, {"vae": "any", "size_multiples": [16, 16]})
    job = Job(tmp_path / "cache", World(0, 1, torch.device("cpu")))
    write_buckets(VariableVideoTextDataset(str(images), ast.literal_eval(buckets)), {BUCKETS: one}, job)
    text = CONFIG.format(buckets=buckets).replace("VariableVideo", "CachedVariableVideo")
    page = tmp_path / "sheet.png"
    options = (f"--data-path={images}", f"--dataset.cache_dir={tmp_path / 'cache'}", f"--contact-sheet={page}")
    code, out = run_on(tmp_path / "c.py", text, monkeypatch, capsys, *options)
    assert code == 0, out
    assert "8 samples as the model sees them" in out
    pixels = np.asarray(Image.open(page)).reshape(-1, 3)
    assert all(((pixels == (30 * i, 200, 90)).all(1).sum() >= 48 * 80) for i in range(8))
    for path in tmp_path.glob("?.png"):
        path.unlink()
    code, out = run_on(tmp_path / "c.py", text, monkeypatch, capsys, *options)
    assert code == 0, out
    assert "not drawn: " in out
    assert "0.png" in out.split("not drawn: ")[1]


def test_a_whole_clip_of_a_cache_is_drawn_as_its_window(clips_csv, tmp_path, monkeypatch, capsys):
    table = tmp_path / "one.csv"
    table.write_text("".join(clips_csv.read_text().splitlines(keepends=True)[:2]))
    settings = {"num_frames": 3, "frame_interval": 4, "image_size": (32, 48), "root": str(clips_csv.parent)}
    features, vae = CLIP_FEATURES, cache_settings("any", (32, 48), "center", "fp16")
    with RecordWriter(tmp_path / "cache" / "clips", features, settings=vae) as writer:
        path = clips_csv.parent / "pink_clouds.mp4"
        record = {"moments": torch.zeros(8, 52, 4, 6), "source": source_hash(path), "num_frames": 52, "fps": 24.0}
        writer.write(record, "pink_clouds.mp4")
    stored = CachedVideoTextDataset(str(table), str(tmp_path / "cache"), **settings)
    pixels = VideoTextDataset(str(table), **settings)
    for epoch in range(3):
        assert torch.equal(stored.pixels(SampleKey(epoch, 0)), pixels[SampleKey(epoch, 0)]["video"])


def test_clips_that_lose_more_than_half_to_a_crop(examine, images, clips_csv, tmp_path, monkeypatch, capsys):
    code, out = examine(images, '{"32x64": {1: (1.0, 2)}}')
    assert code == 1
    assert (
        "! 4 of 8 clips lose more than half of their area to the crop, such as 1.png of 96x64, of which 32x64 keeps 33%"
        in out
    )
    text = CONFIG.format(buckets=None).replace("VariableVideoTextDataset", "VideoTextDataset")
    options = (f"--data-path={clips_csv}", "--num-frames=1", "--image-size", "48", "16", "--samples=4")
    code, out = run_on(tmp_path / "c.py", text, monkeypatch, capsys, *options)
    assert code == 1
    assert "! 4 of 4 clips lose more than half" in out
