"""The doctor: what becomes of the rows, what is wrong with them, what the model sees, and an exit code that tells."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
def pictures(tmp_path) -> Path:
    """A table of eight pictures of two shapes."""
    rows = []
    for i in range(8):
        size = ((96, 64), (64, 96))[i % 2]
        Image.new("RGB", size, (30 * i, 200, 90)).save(tmp_path / f"{i}.png")
        rows.append({"path": f"{i}.png", "text": f"picture {i}"})
    return write(tmp_path / "pictures.csv", rows)


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


def test_all_is_well(examine, pictures):
    code, out = examine(pictures, GOOD, "--processes", "2")
    assert code == 0
    assert "8 samples in the table" in out
    assert "64px 1x48x80" in out
    assert "an epoch: 2 steps of 4 samples; 2 batches on each of 2 processes" in out
    assert "samples/s" in out
    assert "!" not in out


def test_what_is_left_out_and_what_would_keep_it(examine, pictures):
    code, out = examine(pictures, '{"240p": {1: (1.0, 2)}, "64px": {1: (1.0, 3), 8: (1.0, 1)}}', "--bucket-tail=drop")
    assert code == 1
    assert "2 samples fill no batch and are dropped; bucket_tail='keep' would keep them" in out
    code, out = examine(pictures, '{"240p": {1: (1.0, 2)}}')
    assert code == 2
    assert "8 left out: too small for every resolution. The smallest is 240p, from 81792 pixels" in out
    assert "would not train" in out


def test_duplicates_empty_captions_and_broken_files(examine, pictures, tmp_path):
    (tmp_path / "6.png").write_bytes((tmp_path / "6.png").read_bytes()[:60])
    rows = list(csv.DictReader(pictures.open(newline="")))
    sizes = [{"num_frames": 1, "height": (64, 96)[i % 2], "width": (96, 64)[i % 2]} for i in range(8)]
    rows = [{**row, **sizes[i], "text": "the same" if i < 4 else row["text"]} for i, row in enumerate(rows)]
    rows[5]["text"] = ""
    rows[7] |= {"height": 640}
    table = write(tmp_path / "bad.csv", [*rows, rows[0]])
    code, out = examine(table, GOOD)
    assert code == 1
    for part in (
        "1 rows are there more than once, such as 0.png", "1 of 9 captions in 'text' are empty", "5 rows have one caption",
        "bad.csv, row 7: ", "6.png", "row 8: height=640, but the file has 96",
    ):  # fmt: skip
        assert part in out, part


def test_the_contact_sheet_shows_what_the_model_sees(examine, pictures, tmp_path):
    sheet = tmp_path / "out" / "sheet.png"
    code, out = examine(pictures, GOOD, f"--contact-sheet={sheet}", "--samples=4")
    assert code == 0
    assert "4 samples as the model sees them" in out
    pixels = np.asarray(Image.open(sheet)).reshape(-1, 3)
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
