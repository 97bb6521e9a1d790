"""Samples in memory: their number, their content, the camera over images, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.in_memory import InMemoryVideoDataset, pan
from opensora.datasets.sampler import SampleKey
from opensora.utils.errors import UserError
from opensora.utils.seed import generator
from tests.datasets.video.videos import CLIPS


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A real clip of 41 frames, 320 x 180, and an image."""
    folder = tmp_path_factory.mktemp("memory")
    ramp = np.linspace(0, 255, 80, dtype=np.uint8)
    Image.fromarray(np.stack([np.tile(ramp, (60, 1))] * 3, axis=2)).save(folder / "ramp.png")
    path = folder / "table.csv"
    path.write_text(f"path,source\n{CLIPS / 'white_dog.mp4'},dog\nramp.png,ramp\n")
    return path


def test_a_clip_counts_once_for_each_of_its_windows(table):
    dataset = InMemoryVideoDataset(str(table), num_frames=9, image_size=(48, 64))
    assert len(dataset) == 41 // 9 + 1
    item = dataset[SampleKey(0, 0)]
    assert item["video"].shape == (3, 9, 48, 64)
    assert item["video"].abs().max() <= 1
    assert item["path"].endswith("white_dog.mp4")
    assert float(item["fps"]) == pytest.approx(30, abs=0.1)
    assert len(InMemoryVideoDataset(str(table), num_frames=9, image_size=(48, 64), repeat_clips=3)) == 3 * (41 // 9) + 1
    assert len(InMemoryVideoDataset(str(table), num_frames=5, frame_interval=4, image_size=(48, 64))) == 2 + 1


def test_a_animated_image_is_a_clip_with_its_own_rate(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    first, *others = (Image.fromarray(frame) for frame in pixels)
    first.save(tmp_path / "clip.webp", save_all=True, append_images=others, lossless=True, duration=40)
    (tmp_path / "table.csv").write_text("path\nclip.webp\n")
    dataset = InMemoryVideoDataset(str(tmp_path / "table.csv"), num_frames=12, image_size=(32, 32), pictures="error")
    item = dataset[SampleKey(0, 0)]
    assert float(item["fps"]) == pytest.approx(25)
    expected = torch.from_numpy(pixels).permute(3, 0, 1, 2) / 127.5 - 1
    video = item["video"] if torch.allclose(item["video"], expected, atol=1e-5) else item["video"].flip(3)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_samples_are_a_function_of_seed_epoch_and_index(table):
    first, again, other = (
        InMemoryVideoDataset(str(table), num_frames=5, image_size=(32, 32), seed=seed) for seed in (1, 1, 2)
    )
    keys = [SampleKey(0, 0), SampleKey(0, 8), SampleKey(1, 0)]
    videos = [first[key]["video"] for key in keys]
    assert all(torch.equal(video, again[key]["video"]) for key, video in zip(keys, videos, strict=True))
    assert not torch.equal(videos[0], videos[2])
    assert not torch.equal(videos[0], other[keys[0]]["video"])
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_an_images_camera_moves_evenly_and_sees_only_the_image():
    ramp = torch.linspace(0, 255, 200).round().to(torch.uint8).view(1, -1, 1).expand(100, -1, 3).contiguous()
    video = pan(ramp, 9, (40, 40), generator(4))  # [3, 9, 40, 40]
    assert video.abs().max() <= 1
    centre = video[0, :, 20, 20]
    moves = centre.diff()
    assert moves.abs().min() > 0
    assert moves.abs().max() - moves.abs().min() < 0.02  # grey levels are whole: 1/127.5 steps
    assert moves.sign().unique().numel() == 1


def test_a_camera_that_stands_still_shows_the_image_itself():
    image = torch.randint(0, 256, (32, 32, 3), generator=generator(0), dtype=torch.uint8)
    video = pan(image, 3, (32, 32), generator(1))
    expected = image.permute(2, 0, 1) / 127.5 - 1
    frame = video[:, 0] if torch.allclose(video[:, 0], expected, atol=1e-5) else video[:, 0].flip(2)
    torch.testing.assert_close(frame, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(video[:, 2], video[:, 0])


def test_images_with_one_frame(table):
    dataset = InMemoryVideoDataset(str(table), num_frames=1, image_size=(32, 32))
    assert len(dataset) == 42
    assert dataset[SampleKey(0, 41)]["video"].shape == (3, 1, 32, 32)


def test_what_cannot_give_a_sample_is_refused(table):
    with pytest.raises(UserError, match="has 41 frames, but num_frames=42"):
        InMemoryVideoDataset(str(table), num_frames=42, image_size=(32, 32))
    with pytest.raises(UserError, match="are images, but num_frames=5"):
        InMemoryVideoDataset(str(table), num_frames=5, image_size=(32, 32), pictures="error")
    with pytest.raises(UserError, match="pictures='stretch' is not one of pan, error"):
        InMemoryVideoDataset(str(table), pictures="stretch")
