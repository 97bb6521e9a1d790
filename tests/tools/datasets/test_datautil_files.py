"""What is found out about files: true for good ones, reported for bad ones, the same on one process and on several."""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tools.datasets.datautil.info import INFO_COLUMNS, measure
from tools.datasets.datautil.parallel import map_rows


@pytest.fixture
def odd_files(tmp_path, clips_csv):
    """A folder with good and bad files: their names."""
    shutil.copy(clips_csv.with_name("cup_portrait.mp4"), tmp_path / "A clip.MP4")
    whole = clips_csv.with_name("meadow_run.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "folder.mp4").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "雨.png")
    good = ["A clip.MP4", "雨.png"]
    bad = [
        "cut.mp4",
        "empty.mp4",
        "text.mp4",
        "text.png",
        "folder.mp4",
        "missing.mp4",
        "http://x.org/a.mp4",
        "notes.txt",
        "",
    ]
    return good, bad


def test_info_measures_good_files_and_keeps_bad_ones(odd_files, tmp_path, do):
    good, bad = odd_files
    names = [bad[0], *good, *bad[1:]]
    table, lines = do({"path": names, "text": names[::-1]}, ("info", True), folder=tmp_path)
    assert table.text("path").tolist() == names
    assert table.text("text").tolist() == names[::-1]
    rows = {row["path"]: row for row in table.frame.to_dict("records")}
    assert [rows["雨.png"][name] for name in ("num_frames", "height", "width", "resolution")] == [1, 20, 30, 600]
    assert np.isnan(rows["雨.png"]["fps"])
    clip = rows["A clip.MP4"]
    assert (clip["height"], clip["width"], clip["status"]) == (240, 180, "ok")
    assert clip["aspect_ratio"] == 240 / 180
    for name in bad:
        assert rows[name]["status"] != "ok"
        assert "\n" not in rows[name]["status"]
        assert pd.isna(rows[name]["num_frames"])
        assert np.isnan(rows[name]["aspect_ratio"])
    assert "2 files measured, 9 broken, such as: " in lines[0]


def test_what_is_measured_is_what_the_shipped_table_says(clips_csv, do):
    from opensora.datasets.table.files import read_frame

    frame = read_frame(clips_csv)
    table, _ = do(frame, ("info", True), folder=clips_csv.parent)
    for column in ("num_frames", "height", "width"):
        assert table.text(column).tolist() == frame[column].tolist()
    assert (table.numbers("resolution") == table.numbers("height") * table.numbers("width")).all()
    assert table.text("status").eq("ok").all()


def test_broken_files_go_with_a_filter_that_says_so(odd_files, tmp_path, do):
    good, bad = odd_files
    for step in (("fmin", 1.0), ("remove-broken", True)):
        table, lines = do({"path": [*good, *bad]}, ("info", True), step, folder=tmp_path)
        assert table.text("path").tolist() == good
    assert lines[1] == "--remove-broken: 11 -> 2 rows (dropped: 9 with a status that is not ok)"
    table, lines = do({"path": [*good, *bad]}, ("ext", True), folder=tmp_path)
    assert table.text("path").tolist() == [*good, *bad[:4]]
    assert "5 whose file does not exist" in lines[0]


@pytest.mark.slow
def test_one_process_and_several_give_the_same(odd_files, tmp_path, clips_csv, do):
    good, bad = odd_files
    names = [*good, *bad, *(str(path) for path in sorted(clips_csv.parent.glob("*.mp4")))]
    texts = [f"<b>{name}</b>  the  dog" for name in names]
    steps = [("info", True), ("filesize", True), ("clean-caption", True), ("ext", True)]
    one, lines_one = do({"path": names, "text": texts}, *steps, folder=tmp_path, workers=1)
    two, lines_two = do({"path": names, "text": texts}, *steps, folder=tmp_path, workers=2)
    pd.testing.assert_frame_equal(one.frame, two.frame)
    assert lines_one == lines_two
    assert set(INFO_COLUMNS) < set(one.frame)


def test_file_sizes_are_in_mebibytes(tmp_path, do):
    (tmp_path / "a.mp4").write_bytes(b"0" * 3 * 2**20)
    table, lines = do({"path": ["a.mp4", "b.mp4"]}, ("filesize", True), folder=tmp_path)
    np.testing.assert_array_equal(table.numbers("filesize"), [3, np.nan])
    assert lines == ["--filesize: 2 -> 2 rows; 1 files do not exist"]
    table, _ = do({"path": ["a.mp4", "b.mp4"]}, ("filesize", True), ("fsmax", 2.9), folder=tmp_path)
    assert len(table) == 0


def square_or_die(number: int) -> int:
    if number % 40 == 7:
        os._exit(1)  # as a decoder that crashes
    return number**2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_row_that_kills_its_process_costs_that_row_alone(workers):
    found = map_rows(square_or_die, range(150), workers=workers, label="squares", crashed=lambda number: -number)
    assert found == [-n if n % 40 == 7 else n**2 for n in range(150)]


def test_results_are_in_order():
    assert map_rows(abs, range(-300, 0), workers=2, label="") == list(range(300, 0, -1))
    assert map_rows(abs, [], workers=2, label="") == []


def test_measure_raises_nothing(tmp_path):
    for path in (tmp_path, tmp_path / "no.mp4", Path("\0.mp4"), tmp_path / ("x" * 300 + ".mp4")):
        assert measure(path).num_frames is None
