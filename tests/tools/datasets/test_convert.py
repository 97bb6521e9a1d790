"""Folders become tables that training reads."""

import os
import shutil

import pytest
from PIL import Image

from opensora.datasets.table.files import read_frame
from opensora.datasets.table.table import read_table
from opensora.utils.errors import UserError
from tools.datasets.convert import run


@pytest.fixture
def convert(tmp_path):
    """`convert("video", folder, ...)` -> the table."""

    def call(kind, *argv):
        return read_frame(run([kind, *map(str, argv), "--output", str(tmp_path / "out" / "t.csv"), "--overwrite"]))

    return call


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_a_folder_of_videos(tmp_path, clips_csv, convert, capsys):
    folder = tmp_path / "videos"
    (folder / "b").mkdir(parents=True)
    shutil.copy(clips_csv.with_name("meadow_run.mp4"), folder / "b" / "Run, run.MP4")
    touch(folder, "a.mp4", "b/a.mov", ".hidden.mp4", ".cache/c.mp4", "notes.md", "README")
    frame = convert("video", folder, "--info")
    assert frame["relpath"].tolist() == ["a.mp4", "b/Run, run.MP4", "b/a.mov"]
    assert frame["id"].tolist() == ["a", "Run, run", "a"]
    assert frame["path"].tolist() == [str(folder / name) for name in frame["relpath"]]
    assert [status == "ok" for status in frame["status"]] == [False, True, False]
    assert frame["height"].tolist() == ["", "180", ""]
    out = capsys.readouterr().out
    for line in ("1 .md files", "1 files without extension files", "1 hidden folders", "1 hidden files"):
        assert f"left out: {line}" in out
    assert "1 files measured, 2 broken" in out


def test_tables_have_open_soras_names_unless_they_are_given_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "f", "train/ApplyLipstick/a.avi", "list01.txt")
    (tmp_path / "f" / "list01.txt").write_text("train/ApplyLipstick/a.avi 1\n")
    assert run(["video", "f"]).name == "videos.csv"
    assert run(["ucf101", "f", "--split", "train"]).name == "ucf101_train.csv"
    assert run(["classes", "f", "--split", "list01.txt"]).name == "classes_list01.csv"


def test_the_clips_of_the_repository_can_be_trained_on(tmp_path, clips_csv, convert):
    frame = convert("video", clips_csv.parent, "--paths", "relative")
    table = read_table(tmp_path / "out" / "t.csv", text_columns=())  # looks for the files
    assert len(table) == len(frame) == len(read_frame(clips_csv))


def test_captions_beside_the_images(tmp_path, convert):
    touch(tmp_path / "f", "a.png", "b.jpg", "a.txt")
    frame = convert("image", tmp_path / "f", "--captions", "txt")
    assert frame[["id", "text"]].to_dict("list") == {"id": ["a", "b"], "text": ["a.txt", ""]}


def test_class_folders(tmp_path, convert):
    touch(
        tmp_path / "f",
        "train/cat/1.jpg",
        "train/big_dog/x/2.jpg",
        "train/big_dog/3.mp4",
        "train/loose.jpg",
        "val/cat/4.jpg",
    )
    frame = convert("classes", tmp_path / "f", "--split", "train")
    assert frame[["relpath", "text", "label"]].values.tolist() == [
        ["big_dog/3.mp4", "big dog", "0"], ["big_dog/x/2.jpg", "big dog", "0"], ["cat/1.jpg", "cat", "1"]
    ]  # fmt: skip
    with pytest.raises(UserError, match="--split test: neither a folder"):
        convert("classes", tmp_path / "f", "--split", "test")


def test_imagenet_is_numbered_as_everywhere_else(tmp_path, convert):
    from torchvision.models import ResNet18_Weights

    categories = ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    touch(tmp_path / "f", "n02391049/a.JPEG", "n01440764/b.JPEG", "n02391049/c.JPEG")
    frame = convert("imagenet", tmp_path / "f")
    assert frame["label"].tolist() == ["0", "340", "340"]
    assert frame["text"].tolist() == ["tench, Tinca tinca", "zebra", "zebra"]
    assert [categories[int(label)] for label in frame["label"]] == ["tench", "zebra", "zebra"]
    touch(tmp_path / "f", "cat/d.JPEG")
    with pytest.raises(UserError, match="'cat' is not one of ImageNet's"):
        convert("imagenet", tmp_path / "f")


def test_ucf101_with_its_own_lists(tmp_path, convert, capsys):
    touch(tmp_path / "f", "ApplyEyeMakeup/v1.avi", "Archery/v2.avi", "Archery/v3.avi", "YoYo/v4.avi")
    (tmp_path / "trainlist01.txt").write_text("ApplyEyeMakeup/v1.avi 1\r\nArchery/v3.avi 2\nYoYo/v9.avi 101\n")
    frame = convert("ucf101", tmp_path / "f", "--split", tmp_path / "trainlist01.txt")
    assert frame[["relpath", "text", "label"]].values.tolist() == [
        ["ApplyEyeMakeup/v1.avi", "Apply Eye Makeup", "0"], ["Archery/v3.avi", "Archery", "1"]
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "left out: 2 files that" in out
    assert "left out: 1 lines of" in out
    assert convert("ucf101", tmp_path / "f")["label"].tolist() == ["0", "1", "1", "2"]


def test_vidprom(tmp_path, convert, capsys):
    known, unknown = "01234567-89ab-cdef-0123-456789abcdef", "f1234567-89ab-cdef-0123-456789abcdef"
    touch(tmp_path / "f", f"pika-{known}.mp4", f"pika-{unknown}.mp4")
    (tmp_path / "v.csv").write_text(f'uuid,prompt\n{known},"a dog, running"\n')
    frame = convert("vidprom", tmp_path / "f", "--info", tmp_path / "v.csv")
    assert frame[["id", "text"]].values.tolist() == [[f"pika-{known}", "a dog, running"]]
    assert "left out: 1 videos that v.csv does not name" in capsys.readouterr().out


def test_links_are_followed_once(tmp_path, convert):
    touch(tmp_path / "f", "a/1.mp4")
    touch(tmp_path / "g", "2.mp4")
    (tmp_path / "f" / "b").symlink_to(tmp_path / "g")
    (tmp_path / "f" / "a" / "loop").symlink_to(tmp_path / "f")
    assert convert("video", tmp_path / "f")["relpath"].tolist() == ["a/1.mp4", "b/2.mp4"]


def test_a_name_that_is_no_text_is_counted(tmp_path, convert, capsys):
    touch(tmp_path / "f", "ü.mp4")
    (tmp_path / "f" / os.fsdecode(b"\xff.mp4")).touch()
    assert convert("video", tmp_path / "f")["id"].tolist() == ["ü"]
    assert "left out: 1 files whose names are not UTF-8" in capsys.readouterr().out


def test_mistakes(tmp_path):
    touch(tmp_path / "f", "a.txt", "b.TXT")
    Image.new("RGB", (2, 2)).save(tmp_path / "f" / "c.png")
    for argv, message in [
        (["video", tmp_path / "f"], r"has no file with one of .*; it has: 2 \.txt files; 1 \.png files"),
        (["video", tmp_path / "none"], "is no folder"),
        (["classes", tmp_path / "f"], "has no folders"),
    ]:
        with pytest.raises(UserError, match=message):
            run([*map(str, argv), "--output", str(tmp_path / "t.csv")])
    run(["image", str(tmp_path / "f"), "--output", str(tmp_path / "t.csv")])
    with pytest.raises(UserError, match="exists"):
        run(["image", str(tmp_path / "f"), "--output", str(tmp_path / "t.csv")])
    with pytest.raises(UserError, match="is no table"):
        run(["image", str(tmp_path / "f"), "--output", str(tmp_path / "t.txt")])


@pytest.mark.parametrize("paths", ["absolute", "relative"])
def test_paths_lead_to_the_files_where_the_tables_folder_is_a_link(tmp_path, paths):
    touch(tmp_path / "videos", "a.mp4")
    touch(tmp_path / "far" / "away" / "tables", "b/c.mp4")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away" / "tables")
    for folder in (tmp_path / "videos", tmp_path / "link", tmp_path / "far" / "away" / "tables"):
        output = run(
            ["video", str(folder), "--output", str(tmp_path / "link" / "t.csv"), "--paths", paths, "--overwrite"]
        )
        (path,) = read_frame(output)["path"]
        assert (output.parent / path).is_file()
        assert os.path.isabs(path) == (paths == "absolute")  # noqa: PTH117
    if paths == "relative":
        assert path == "b/c.mp4"
