"""Scorers that look at single images: static, black, sharpness, duplicates, writing."""

import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter

from opensora.datasets.video.read_video import read_frames
from opensora.utils.errors import UserError
from tests.tools.scoring.videos import image, seen, write_video
from tools.scoring.duplicate import Duplicate, clip_hash, first_alike
from tools.scoring.ocr import covered, finder
from tools.scoring.registry import names, scorer

CLIPS = Path(__file__).parents[3] / "assets" / "clips"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_frozen_clip_is_static_and_a_walk_before_a_fixed_camera_is_not(tmp_path, moving):
    scene = seen(image(0))
    walk = [scene.copy() for _ in range(24)]
    for i, frame in enumerate(walk):
        frame[60:120, 10 * i : 10 * i + 30] = 250
    frozen = [seen(image(0), right=min(i, 24)) for i in range(72)]  # moves for a second, then stops for two
    files = [moving("static"), write_video(tmp_path / "w.mp4", walk), write_video(tmp_path / "f.mp4", frozen)]
    still, walking, stopped = (row["static"] for row in scorer("static").score(files))
    assert still == 1
    assert walking == 0
    assert 0.5 < stopped < 0.8
    Image.fromarray(scene).save(tmp_path / "p.png")
    assert scorer("static").score([tmp_path / "p.png"]) == [{"static": 1}]


def test_black_frames_are_counted(tmp_path):
    bright, dark = seen(image(1)), np.full((180, 320, 3), 6, np.uint8)
    dark[:4, :4] = 255  # a logo
    files = [write_video(tmp_path / "h.mp4", [bright] * 8 + [dark] * 8), CLIPS / "city_white.mp4"]
    half, night = (row["black"] for row in scorer("black").score(files))
    assert half == 0.5
    assert night == 0


def test_blur_lowers_sharpness(tmp_path):
    sharp = [np.random.default_rng(i).integers(0, 255, (180, 320, 3), dtype=np.uint8) for i in range(6)]
    blurred = [gaussian_filter(frame, (2, 2, 0)) for frame in sharp]
    files = [write_video(tmp_path / "s.mp4", sharp), write_video(tmp_path / "b.mp4", blurred)]
    first, second = (row["sharpness"] for row in scorer("sharpness").score(files))
    assert first > 10 * second


def test_planted_duplicates_are_found_and_others_are_not(tmp_path):
    clip = read_frames(CLIPS / "pink_clouds.mp4", 0, 48).numpy()
    small = [np.array(Image.fromarray(frame).resize((200, 112))) for frame in clip]
    slow = write_video(tmp_path / "slow.mp4", clip[::2], fps=12, crf=30)
    files = [*sorted(CLIPS.glob("*.mp4")), write_video(tmp_path / "small.mp4", small, crf=28), slow]
    first = write_video(tmp_path / "original.mp4", clip)
    paths = [first, *files]
    chosen = scorer("duplicate")
    table = {"path": [p.name for p in paths], "phash": [row["phash"] for row in chosen.score(paths)]}
    found = chosen.compare(table)
    planted = {name: of for name, of in zip(table["path"], found["duplicate_of"], strict=True) if of}
    assert planted.pop("small.mp4") == planted.pop("slow.mp4") == "original.mp4"
    assert planted in ({}, {"pink_clouds.mp4": "original.mp4"})  # it goes on for some frames more
    assert all(bits <= 6 for bits in found["duplicate_bits"] if bits is not None)


def test_plain_clips_have_no_hash(tmp_path):
    plain = write_video(tmp_path / "p.mp4", [np.full((64, 64, 3), 30, np.uint8)] * 5)
    assert clip_hash(plain) is None
    table = {"path": ["a", "b"], "phash": [None, None]}
    assert Duplicate().compare(table) == {"duplicate_of": [None] * 2, "duplicate_bits": [None] * 2}


def turned(hashes: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Hashes with up to `most` bits of each frame turned."""
    turned = hashes.copy()
    for _ in range(most):
        bits = np.uint64(1) << rng.integers(0, 64, hashes.shape).astype(np.uint64)
        turned ^= np.where(rng.random(hashes.shape) < 0.7, bits, np.uint64(0))
    return turned


def by_the_definition(hashes: np.ndarray, bits: int) -> list[tuple[int, int, int]]:
    rows = [[int(frame) for frame in row] for row in hashes]
    kept, found = [], []
    for i, row in enumerate(rows):
        for j in kept:
            apart = max(bin(a ^ b).count("1") for a, b in zip(row, rows[j], strict=True))
            if apart <= bits:
                found.append((i, j, apart))
                break
        else:
            kept.append(i)
    return found


def sets_of_hashes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 63, (60, 3), dtype=np.uint64)
    drift = np.cumsum(np.eye(3, dtype=np.uint64)[np.arange(300) % 3], axis=0)
    return {
        "unlike": rng.integers(0, 1 << 63, (300, 3), dtype=np.uint64),
        "near": turned(base[:1].repeat(400, 0), 3, rng),
        "about as near as counts": turned(base[:1].repeat(250, 0), 6, rng),
        "of some kinds": turned(base[rng.integers(0, 60, 400)], 4, rng),
        "drifting": np.uint64(1) << (drift % np.uint64(64)) ^ (np.uint64(1) << (drift // np.uint64(3))),
        "equal": base[:1].repeat(20, 0),
        "none": base[:0],
    }


@pytest.mark.slow
@pytest.mark.parametrize("few", [1, 40, 2000])
@pytest.mark.parametrize("kind", sets_of_hashes())
def test_duplicates_are_those_of_the_definition_however_they_are_searched(monkeypatch, kind, few):
    monkeypatch.setattr("tools.scoring.duplicate.FEW", few)
    monkeypatch.setattr("tools.scoring.duplicate.BLOCK", 64)
    hashes = sets_of_hashes()[kind]
    for bits in (0, 3, 6):
        assert list(first_alike(hashes, bits)) == by_the_definition(hashes, bits)


def test_memory_grows_with_the_clips_also_where_all_are_alike(monkeypatch):
    monkeypatch.setattr("tools.scoring.duplicate.FEW", 500)  # so that it is the search for many
    rng = np.random.default_rng(0)
    hashes = turned(rng.integers(0, 1 << 63, (1, 3), dtype=np.uint64).repeat(3000, 0), 3, rng)
    tracemalloc.start()
    found = sum(1 for _ in first_alike(hashes, 6))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 2999
    assert peak < 1000 * len(hashes)  # bytes; the pairs are 4.5 million


def test_what_is_kept_is_never_called_a_duplicate():
    base = np.array([[0, 0, 0], [0b111, 0, 0], [0b111111, 0, 0], [0, 0, 0]], np.uint64)
    # the third is like the second, but the second is not kept
    assert list(first_alike(base, 3)) == [(1, 0, 3), (3, 0, 0)]
    with pytest.raises(UserError, match="bits=40"):
        Duplicate(bits=40).compare({"path": [], "phash": []})


def test_boxes_that_overlap_count_once():
    box = np.array([[0, 0], [49, 0], [49, 9], [0, 9]], np.float32)
    assert covered([box, box + np.float32([0, 5])], 100, 100) == pytest.approx(0.075)
    assert covered([], 10, 10) == 0


has_ocr = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr_onnxruntime") is None,
    reason="rapidocr-onnxruntime has no release for this Python",
)


@pytest.mark.slow
@has_ocr
def test_writing_is_found(tmp_path):
    scene = Image.fromarray(seen(image(2), size=(360, 640)))
    scene.save(tmp_path / "without.png")
    font = ImageFont.load_default(size=48)
    ImageDraw.Draw(scene).text(
        (60, 150), "Closed on Monday", fill="white", font=font, stroke_width=3, stroke_fill="black"
    )
    scene.save(tmp_path / "with.png")
    real = [CLIPS / f"{name}.mp4" for name in ("title_meadow", "pink_clouds", "white_dog")]
    written, plain, title, clouds, dog = scorer("ocr").score([tmp_path / "with.png", tmp_path / "without.png", *real])
    assert written["ocr"] >= 1
    assert 0.03 < written["ocr_area"] < 0.3
    assert title["ocr"] >= 2
    assert plain == clouds == dog == {"ocr": 0, "ocr_area": 0}


def test_without_rapidocr_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    finder.cache_clear()
    with pytest.raises(UserError, match="pip install rapidocr-onnxruntime"):
        scorer("ocr").score([CLIPS / "white_dog.mp4"])


WITHOUT_WEIGHTS = [name for name in names() if name not in ("aesthetic", "matching", "ocr")]


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_broken_file_is_reported_and_the_others_are_scored(name, tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes((CLIPS / "white_dog.mp4").read_bytes()[:3000])
    chosen = scorer(name)
    sound, bad, missing = chosen.score([CLIPS / "white_dog.mp4", broken, tmp_path / "none.mp4"])
    assert set(sound) == set(chosen.columns)
    for row in (bad, missing):
        assert all(row[column] is None for column in chosen.columns)
        assert ".mp4" in row["error"]


def test_unknown_scorers_and_settings_are_errors():
    with pytest.raises(UserError, match="Did you mean 'flow'"):
        scorer("flwo")
    with pytest.raises(UserError, match="no setting 'fsp'"):
        scorer("flow", fsp=3)


@pytest.mark.nightly
@pytest.mark.slow
def test_images_are_read_where_there_is_no_pyav(tmp_path):
    frames = [Image.new("RGB", (32, 24), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "two.webp", save_all=True, append_images=frames[1:], duration=400)
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from pathlib import Path\n"
        "from tools.scoring.frames import key_frames\n"
        f"print([frame[0, 0].argmax() for frame in key_frames(Path({str(tmp_path / 'two.webp')!r}), (0, 1))])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    assert run.returncode == 0, run.stderr
    assert [int(digit) for digit in run.stdout if digit in "012"] == [0, 2]
