"""The clips and prompts of the repository are what their table says."""

import csv
import difflib
from pathlib import Path

import av
import pytest

ASSETS = Path(__file__).resolve().parent.parent / "assets"
CLIPS = ASSETS / "clips"
CAPTIONS = ["text", "text_2", "text_3", "text_4", "text_5", "text_6"]
COLUMNS = [
    *("path", *CAPTIONS, "paraphrase", "blind", "num_frames", "height", "width", "aspect_ratio", "fps"),
    *("source", "license", "start_frame", "crop"),
]

with (CLIPS / "clips.csv").open(newline="") as file:
    READER = csv.DictReader(file)
    ROWS = list(READER)


def test_table_and_folder_agree():
    assert READER.fieldnames == COLUMNS
    assert sorted(row["path"] for row in ROWS) == sorted(path.name for path in CLIPS.glob("*.mp4"))


def test_clips_are_small_enough_for_a_repository():
    assert sum(path.stat().st_size for path in CLIPS.iterdir() if path.is_file()) <= 4 * 2**20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_clip_is_as_its_row_says(row):
    with av.open(str(CLIPS / row["path"]), mode="r") as container:
        assert len(container.streams) == 1
        assert "location" not in container.metadata
        rate = container.streams.video[0].average_rate
        frames = [(frame.height, frame.width, frame.time) for frame in container.decode(video=0)]
    height, width, fps = int(row["height"]), int(row["width"]), int(row["fps"])
    assert {frame[:2] for frame in frames} == {(height, width)}
    assert len(frames) == int(row["num_frames"])
    assert float(row["aspect_ratio"]) == pytest.approx(height / width, abs=1e-4)
    assert rate == fps
    assert frames[-1][2] - frames[0][2] == pytest.approx((len(frames) - 1) / fps, abs=1e-3)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_paraphrase_is_held_out(row):
    held_out = row["paraphrase"].lower().split()
    for column in CAPTIONS:
        alike = difflib.SequenceMatcher(None, row[column].lower().split(), held_out).ratio()
        assert alike < 0.6, f"{column} nearly repeats the paraphrase"


def test_captions_are_distinct():
    captions = [row[column].strip().lower() for row in ROWS for column in [*CAPTIONS, "paraphrase"]]
    assert all(captions)
    assert len(set(captions)) == len(captions)


def test_every_clip_is_attributed():
    attribution = (CLIPS / "ATTRIBUTION.md").read_text()
    lines = [line for line in attribution.splitlines() if line.startswith("|")]
    for row in ROWS:
        assert row["license"], row["path"]
        line = next((line for line in lines if row["source"] in line.split("|")[1]), None)
        assert line is not None, f"{row['source']} is not in ATTRIBUTION.md"
        assert Path(row["path"]).stem in line.replace(",", " ").split(), f"{row['path']} is not in ATTRIBUTION.md"


def test_sample_prompts_are_one_per_line():
    prompts = (ASSETS / "texts" / "t2v_samples.txt").read_text().splitlines()
    assert len(prompts) == 10
    assert all(prompt == prompt.strip() and prompt for prompt in prompts)
    assert len(set(prompts)) == len(prompts)
