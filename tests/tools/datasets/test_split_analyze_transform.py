"""Splitting without leaks, looking, and new files from old ones; more frames between frames."""

import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.video.read_video import probe, read_frames
from opensora.utils.errors import UserError
from tools.datasets import analyze
from tools.datasets.datautil.__main__ import run as datautil
from tools.datasets.split import groups_of, run, shares_of
from tools.datasets.transform import img_rand_crop, img_resize, vid_frame_extract
from tools.datasets.transform import main as transform_command
from tools.datasets.transform import run as transform
from tools.footage.__main__ import run as chain
from tools.footage.rows import read_rows, write_rows
from tools.frame_interpolation.interpolation import FlowMiddle, LearnedMiddle, interpolated
from tools.frame_interpolation.interpolation import run as interpolate

CLIPS = Path(__file__).parents[3] / "assets" / "clips"


def test_a_video_is_in_one_part(tmp_path):
    rows = [{"path": f"{i}.mp4", "source": f"video{i // 7}", "digest": f"{i}"} for i in range(200)]
    rows[3]["digest"] = rows[150]["digest"] = "copy"  # which ties two videos together
    write_rows(tmp_path / "t.csv", rows)
    targets = run(tmp_path / "t.csv", {"train": 0.8, "val": 0.2}, ["source", "digest"])
    parts = {part: list(read_rows(path)) for part, path in targets.items()}
    sources = {part: {row["source"] for row in of} for part, of in parts.items()}
    assert not sources["train"] & sources["val"]
    assert len({part for part, of in parts.items() for row in of if row["digest"] == "copy"}) == 1
    assert sum(map(len, parts.values())) == 200
    assert len(parts["val"]) == pytest.approx(40, abs=14)


def test_groups_are_connected_components(tmp_path):
    rng = np.random.default_rng(0)
    paths = [f"{i}.mp4" for i in range(300)]
    rows = [
        {"path": path, "source": f"s{rng.integers(200)}", "digest": rng.choice(["", f"d{rng.integers(300)}"])}
        | {"duplicate_of": rng.choice(["", "", paths[rng.integers(300)]])}
        for path in paths
    ]
    write_rows(tmp_path / "t.csv", rows)
    for by in (["source"], ["digest"], ["path", "duplicate_of"], ["source", "digest", "path", "duplicate_of"]):
        reached = list(range(300))  # by going from row to row until nothing changes
        same = [
            {(("path" if n == "duplicate_of" else n), row[n]) for n in by if row[n] not in (None, "")} for row in rows
        ]
        while True:
            least = {key: min(reached[i] for i, keys in enumerate(same) if key in keys) for key in set().union(*same)}
            after = [min([reached[i], *(least[key] for key in keys)]) for i, keys in enumerate(same)]
            if after == reached:
                break
            reached = after
        assert groups_of(tmp_path / "t.csv", by).tolist() == reached, by


@pytest.fixture
def with_copies(tmp_path):
    """A table in a folder of its own, of 50 clips and a copy of each."""
    rows = [{"path": f"clips/{i}.mp4", "duplicate_of": ""} for i in range(50)]
    rows += [{"path": f"clips/copy{i}.mp4", "duplicate_of": f"clips/{i}.mp4"} for i in range(50)]
    (tmp_path / "a").mkdir()
    write_rows(tmp_path / "a" / "x.csv", rows)
    return tmp_path / "a" / "x.csv"


def leaks(table: Path) -> int:
    targets = run(table, {"train": 0.8, "val": 0.2}, ["duplicate_of"])
    part = {Path(row["path"]).stem: name for name, path in targets.items() for row in read_rows(path)}
    return sum(part[f"copy{i}"] != part[str(i)] for i in range(50))


@pytest.mark.parametrize("options", [(), ("--abspath",), ("--relpath", ".")])
def test_copies_stay_in_one_part_when_paths_are_rewritten(with_copies, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    datautil([str(with_copies), *options, "--output", str(tmp_path / "b" / "y.csv")])
    assert leaks(tmp_path / "b" / "y.csv") == 0


def test_copies_stay_in_one_part_when_the_column_comes_from_another_table(with_copies, tmp_path):
    write_rows(tmp_path / "y.csv", ({"path": f"a/{row['path']}"} for row in read_rows(with_copies)))
    datautil([str(tmp_path / "y.csv"), "--abspath", "--merge", str(with_copies), "--output", str(tmp_path / "z.csv")])
    assert leaks(tmp_path / "z.csv") == 0


@pytest.mark.parametrize("folder", ["a", "elsewhere"])
def test_copies_stay_in_one_part_behind_a_chain(with_copies, tmp_path, folder):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"stages:\n- {{type: read, table: {with_copies}}}\n- {{type: table, output: train.csv}}\n")
    chain(recipe, tmp_path / folder)
    rows = list(read_rows(tmp_path / folder / "train.csv"))
    base = "" if folder == "a" else f"{tmp_path}/a/"  # below the chain's folder, paths become relative again
    assert rows[50] == {"path": f"{base}clips/copy0.mp4", "duplicate_of": f"{base}clips/0.mp4"}
    assert leaks(tmp_path / folder / "train.csv") == 0


def test_a_split_refuses_paths_that_were_rewritten_in_one_column_alone(with_copies, tmp_path, capsys):
    rows = list(read_rows(with_copies))
    write_rows(tmp_path / "y.csv", ({**row, "path": f"a/{row['path']}"} for row in rows))
    with pytest.raises(UserError, match=r"50 rows are a duplicate_of a path that no row has.*but there is a/clips"):
        leaks(tmp_path / "y.csv")
    assert not list(tmp_path.glob("y_*.csv"))
    write_rows(tmp_path / "z.csv", rows[1:])  # the first of two has been dropped
    run(tmp_path / "z.csv", {"train": 0.8, "val": 0.2}, ["duplicate_of"])
    assert "1 rows are a duplicate_of a path that no row has, such as clips/0.mp4" in capsys.readouterr().out


def test_a_source_is_rewritten_where_it_is_a_file_and_not_where_it_is_a_name(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        rows = [{"path": "a.mp4", "source": "video.mp4"}, {"path": "b.mp4", "source": "trailer"}]
        write_rows(tmp_path / folder / "t.csv", rows)
        (tmp_path / folder / "video.mp4").touch()
    datautil([*(str(tmp_path / folder / "t.csv") for folder in "xy"), "--output", str(tmp_path / "t.csv")])
    assert [row["source"] for row in read_rows(tmp_path / "t.csv")] == [
        "x/video.mp4",
        "trailer",
        "y/video.mp4",
        "trailer",
    ]


def test_the_order_of_rows_changes_no_part(tmp_path):
    rows = [{"path": f"{i}.mp4", "source": f"video{i // 5}"} for i in range(60)]
    write_rows(tmp_path / "a.csv", rows)
    write_rows(tmp_path / "b.csv", rows[::-1])
    one, other = (run(tmp_path / name, shares_of(["train=0.5", "val=0.5"]), seed=3) for name in ("a.csv", "b.csv"))
    assert {row["path"] for row in read_rows(one["val"])} == {row["path"] for row in read_rows(other["val"])}


@pytest.mark.parametrize("texts", [["a=1"], ["a=0.5", "b=0.4"], ["a=0.5", "a=0.5"], ["a=x", "b=1"]])
def test_shares_must_make_sense(texts):
    with pytest.raises(UserError, match="--parts"):
        shares_of(texts)


def test_a_page_of_histograms(tmp_path, monkeypatch):
    config = tmp_path / "c.py"
    config.write_text(
        '"""Toy."""\ndataset = dict(type="VariableVideoTextDataset")\nbucket_config = {"144px": {16: (1.0, 2)}}\n'
        'model = dict(type="STDiT2-XL/2")\nvae = dict(type="VideoAutoencoderKL")\ntext_encoder = dict(type="t5")\n'
        'scheduler = dict(type="iddpm")\n'
    )
    options = ["-o", tmp_path / "p.html", "--config", config]
    monkeypatch.setattr(sys, "argv", ["analyze", str(CLIPS / "clips.csv"), *map(str, options)])
    analyze.main()
    page = (tmp_path / "p.html").read_text()
    assert "least 24, median 55, largest 64, 21 rows" in page  # num_frames, as datautil --stats has it
    assert "CC-BY-3.0" in page
    assert "samples in each bucket" in page
    assert "seconds" in page


def test_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (60, 90, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    row = img_resize(tmp_path / "a.png", tmp_path / "o" / "a.png", 45)[0]
    assert (row["height"], row["width"]) == (30, 45)
    assert img_resize(tmp_path / "a.png", tmp_path / "o" / "b.png", 500)[0]["width"] == 90
    crop = img_rand_crop(tmp_path / "a.png", tmp_path / "o" / "c.png", 20, 30, 42)[0]
    found = np.asarray(Image.open(crop["path"]))
    assert any(np.array_equal(found, pixels[y : y + 20, x : x + 30]) for y in range(41) for x in range(61))
    assert "smaller" in img_rand_crop(tmp_path / "a.png", tmp_path / "o" / "d.png", 100, 30, 42)


def test_as_many_rows_as_frames_are_asked_for(tmp_path):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    rows = [{"path": str(CLIPS / "white_dog.mp4"), "text": "dog"}, {"path": "bad.mp4", "text": ""}]
    write_rows(tmp_path / "t.csv", rows)

    def make(path, target):
        return vid_frame_extract(path, target, None, [0, -1])

    assert transform(tmp_path / "t.csv", tmp_path / "o.csv", tmp_path / "f", make, 1) == 2
    made = list(read_rows(tmp_path / "o.csv"))
    last = probe(CLIPS / "white_dog.mp4").num_frames - 1
    assert [row["frame"] for row in made] == ["0", str(last)]
    assert {row["text"] for row in made} == {"dog"}
    frame = np.asarray(Image.open(tmp_path / made[1]["path"])).astype(int)
    assert np.abs(frame - read_frames(CLIPS / "white_dog.mp4", last, 1)[0].numpy()).mean() < 4
    assert len(list(read_rows(tmp_path / "o_dropped.csv"))) == 1


def test_a_source_is_found_from_where_the_new_table_is(tmp_path, monkeypatch):
    """Its folder is neither that of the old table nor the one in which the command runs."""
    for folder in ("in", "out/images", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    images = [tmp_path / "in" / "a.png", tmp_path / "out" / "images" / "b.png"]
    for image in images:
        Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(image)
    write_rows(tmp_path / "in" / "t.csv", [{"path": "a.png"}, {"path": "../out/images/b.png"}])
    monkeypatch.chdir(tmp_path)
    options = ["img_resize", "in/t.csv", "out/o.csv", "--folder", "out/small", "--length", "45", "--num-workers", "1"]
    monkeypatch.setattr(sys, "argv", ["transform", *options])
    transform_command()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made = list(read_rows(tmp_path / "out" / "o.csv"))
    for row, image in zip(made, images, strict=True):
        assert (tmp_path / "out" / row["source"]).samefile(image)
        assert (tmp_path / "out" / row["path"]).is_file()
    assert made[0]["source"] == str(images[0])  # as `path` is spelled where it lies outside
    datautil([str(tmp_path / "out" / "o.csv"), "--abspath", "--output", str(tmp_path / "moved.csv")])
    assert all(Path(row["source"]).is_file() for row in read_rows(tmp_path / "moved.csv"))


def test_what_is_left_out_and_copies_are_found_from_the_new_table_too(tmp_path):
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "b.png").write_bytes(b"no image")
    rows = [{"path": "a.png", "duplicate_of": "b.png"}, {"path": "b.png", "duplicate_of": ""}]
    write_rows(tmp_path / "in" / "t.csv", rows)
    resize = partial(img_resize, length=45)
    transform(tmp_path / "in" / "t.csv", tmp_path / "out" / "o.csv", tmp_path / "small", resize, 1)
    (kept,), (left_out,) = (list(read_rows(tmp_path / "out" / name)) for name in ("o.csv", "o_dropped.csv"))
    assert kept["duplicate_of"] == left_out["path"] == str(tmp_path / "in" / "b.png")
    assert not left_out["duplicate_of"]


@pytest.mark.parametrize("name", ["o_dropped.csv", "o.csv"])
@pytest.mark.parametrize("own", [True, False])
def test_what_exists_is_refused_before_anything_is_done(tmp_path, name, own):
    table, other = tmp_path / (name if own else "t.csv"), tmp_path / name
    write_rows(table, [{"path": str(CLIPS / "white_dog.mp4")}, {"path": "absent.mp4"}])
    if not own:
        other.write_text("precious")
    before = other.read_bytes()
    with pytest.raises(UserError, match="is the table itself" if own else f"{name} exists; name another"):
        transform(table, tmp_path / "o.csv", tmp_path / "f", partial(img_resize, length=45), 1)
    assert other.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted({table, other})


def test_an_unknown_format_is_refused_before_anything_is_done(tmp_path):
    write_rows(tmp_path / "t.csv", [{"path": str(CLIPS / "white_dog.mp4")}])
    with pytest.raises(UserError, match="is no table"):
        transform(tmp_path / "t.csv", tmp_path / "o.txt", tmp_path / "f", partial(img_resize, length=45), 1)
    assert not (tmp_path / "f").exists()


def test_an_image_may_have_a_long_name(tmp_path):
    name = "x" * 245 + ".png"
    Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(tmp_path / name)
    write_rows(tmp_path / "t.csv", [{"path": name}])
    assert transform(tmp_path / "t.csv", tmp_path / "o.csv", tmp_path / "f", partial(img_resize, length=45), 1) == 1


def test_a_source_below_the_new_table_is_relative_to_it(tmp_path):
    Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(tmp_path / "a.png")
    write_rows(tmp_path / "t.csv", [{"path": str(tmp_path / "a.png")}])
    transform(tmp_path / "t.csv", tmp_path / "o.csv", tmp_path / "small", partial(img_resize, length=45), 1)
    (row,) = read_rows(tmp_path / "o.csv")
    assert row["source"] == "a.png"
    assert Path(row["path"]).parent == Path("small")


def blob(x: float) -> np.ndarray:
    y, c = np.mgrid[:96, :128]
    texture = 90 + 40 * np.sin(c / 7) * np.cos(y / 9)
    spot = 120 * np.exp(-((c - x) ** 2 + (y - 48) ** 2) / 150)
    return np.repeat((texture + spot).clip(0, 255)[..., None], 3, 2).astype(np.uint8)


def test_the_middle_is_where_things_are_halfway():
    middle = FlowMiddle()(blob(50), blob(58)).astype(int)
    blend = (blob(50).astype(int) + blob(58)) // 2
    error, of_blend = (float(np.abs(x - blob(54).astype(int)).mean()) for x in (middle, blend))
    assert error < 0.6 * of_blend


@pytest.mark.parametrize("name", ["cup_tilted", "pink_clouds", "rabbit_climbs_out"])
def test_held_out_frames_of_a_real_clip_are_met_better_than_by_blending(name):
    frames = read_frames(CLIPS / f"{name}.mp4", 0, 21).numpy()
    middle = FlowMiddle()
    errors = np.array([
        [np.abs(guess.astype(int) - frames[i].astype(int)).mean() for guess in (
            middle(frames[i - 1], frames[i + 1]), (frames[i - 1].astype(int) + frames[i + 1]) // 2)]
        for i in range(1, 20, 4)
    ])  # fmt: skip
    assert errors[:, 0].mean() < errors[:, 1].mean()


def test_counts_places_and_length(tmp_path):
    frames = [np.full((4, 4, 3), 40 * i, np.uint8) for i in range(4)]

    def mean(one, other):
        return ((one.astype(int) + other) // 2).astype(np.uint8)

    doubled = list(interpolated(iter(frames), mean, 2))
    assert [int(frame[0, 0, 0]) for frame in doubled] == list(range(0, 121, 10))
    source = CLIPS / "screen_overview.mp4"
    count = interpolate(source, tmp_path / "o.mp4", 1, None, FlowMiddle())
    assert count == 2 * probe(source).num_frames - 1 == probe(tmp_path / "o.mp4").num_frames
    assert probe(tmp_path / "o.mp4").fps == pytest.approx(2 * probe(source).fps)


def test_a_variable_rate_lasts_as_long_as_it_did(tmp_path):
    pts = [3000 * i for i in range(40)] + [120_000 + 9000 * i for i in range(12)]
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"bf": "0"})
        stream.height, stream.width, stream.pix_fmt = 96, 128, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90_000)
        for i, at in enumerate(pts):
            frame = av.VideoFrame.from_ndarray(blob(20 + i), format="rgb24")
            frame.pts, frame.time_base = at, Fraction(1, 90_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    count = interpolate(tmp_path / "v.mp4", tmp_path / "o.mp4", 1, None, lambda one, other: one)
    made = probe(tmp_path / "o.mp4")
    assert count == made.num_frames == 103
    assert made.num_frames / made.fps == pytest.approx(pts[-1] / 90_000, rel=0.02)


class Mean(torch.nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one + other) / 2


def test_a_torchscript_module_is_used(tmp_path):
    torch.jit.script(Mean()).save(str(tmp_path / "m.pt"))
    middle = LearnedMiddle(tmp_path / "m.pt", "cpu")
    assert np.abs(middle(blob(50), blob(58)).astype(int) - (blob(50).astype(int) + blob(58)) / 2).max() <= 1
    (tmp_path / "x.pt").write_bytes(b"no module")
    with pytest.raises(UserError, match="no TorchScript"):
        LearnedMiddle(tmp_path / "x.pt", "cpu")


def test_no_frame_is_beyond_the_end():
    assert "no frame 1000" in vid_frame_extract(CLIPS / "white_dog.mp4", Path("x.jpg"), None, [1000])
