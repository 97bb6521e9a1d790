"""Flow and camera motion against motions that are known, and on real clips."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.models.optical_flow import raft_small

from opensora.utils.errors import UserError
from tests.tools.scoring.videos import image, seen, write_video
from tools.scoring.camera_motion import camera
from tools.scoring.fields import flow_method
from tools.scoring.frames import Pair, pairs
from tools.scoring.registry import scorer

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
WIDTH = 576 / 320  # pixels that scores count in for one of the synthetic clips


def pair(right=0.0, down=0.0, zoom=1.0, seconds=1 / 6, size=(324, 576)):
    scene = image(3, 700, 1000)
    return Pair(seen(scene, size=size), seen(scene, right, down, zoom, size=size), seconds)


@pytest.mark.parametrize(("right", "down"), [(0, 0), (3, 0), (-7.5, 4), (20, -12)])
def test_dis_finds_the_shift(right, down):
    (field,) = flow_method("dis")([pair(right, down)])
    inner = field[30:-30, 30:-30].reshape(-1, 2)
    assert field.shape == (324, 576, 2)
    assert np.abs(np.median(inner, axis=0) - (right, down)).max() < 0.1
    assert np.linalg.norm(inner - (right, down), axis=-1).mean() < 0.5


def test_the_camera_is_found_beside_something_that_moves_by_itself():
    first, second, seconds = pair(right=-6, zoom=1.01)
    second = second.copy()
    first = first.copy()
    thing = image(9, 140, 200)
    first[60:200, 100:300], second[60:200, 125:325] = thing, thing  # a sixth of the image runs 25 pixels to the right
    found = camera(flow_method("dis")([Pair(first, second, seconds)])[0], Pair(first, second, seconds))
    assert found.pan == pytest.approx(36, rel=0.05)  # pixels per second
    assert found.zoom / found.pan == pytest.approx(0.01 * 165 / 6, rel=0.25)  # 165: mean distance from the middle
    assert abs(found.tilt) < 1.5
    assert abs(found.roll) < 1.5


def test_a_plain_image_has_no_camera():
    grey = np.full((324, 576, 3), 120, np.uint8)
    assert camera(np.zeros((324, 576, 2), np.float32), Pair(grey, grey, 0.1)) is None


MOVES = {
    "static": {},
    "pan_right": {"right": -2},
    "pan_left": {"right": 2},
    "tilt_up": {"down": 2},
    "tilt_down": {"down": -2},
    "zoom_in": {"zoom": 1.01},
    "zoom_out": {"zoom": 1 / 1.01},
    "unclassified": {"right": 1.5, "down": 1.5},
}


@pytest.mark.parametrize("word", MOVES)
def test_camera_motions_are_told_apart(word, moving):
    assert scorer("camera_motion").score([moving(word, **MOVES[word])]) == [{"cmotion": word}]


@pytest.mark.parametrize(
    ("name", "word"), [("pink_clouds", "tilt_down"), ("three_rodents", "static"), ("screen_displays", "static")]
)
def test_camera_motions_of_real_clips(name, word):
    assert scorer("camera_motion").score([CLIPS / f"{name}.mp4"]) == [{"cmotion": word}]


def test_flow_counts_pixels_of_576_in_a_third_of_a_second(moving):
    still, slow, fast = scorer("flow").score([moving("static"), moving("slow", right=1), moving("fast", right=3)])
    assert still["flow"] < 0.05
    assert slow["flow"] == pytest.approx(8 * WIDTH, rel=0.05)  # 8 frames are a third of a second
    assert fast["flow"] == pytest.approx(24 * WIDTH, rel=0.1)


def test_flow_does_not_depend_on_size_or_frame_rate(tmp_path):
    scene = image(4)
    frames = [seen(scene, right=i) for i in range(24)]
    half = [frame.reshape(90, 2, 160, 2, 3).mean((1, 3)).astype(np.uint8) for frame in frames]
    files = [
        write_video(tmp_path / "whole.mp4", frames),
        write_video(tmp_path / "half.mp4", half),
        write_video(tmp_path / "slow.mp4", frames[::4], fps=6),
        write_video(tmp_path / "short.mp4", frames[:5]),  # less than a third of a second
    ]
    scores = [row["flow"] for row in scorer("flow").score(files)]
    assert scores == pytest.approx([8 * WIDTH] * 4, rel=0.08)


def test_moving_and_still_real_clips_are_told_apart():
    paths = [CLIPS / f"{name}.mp4" for name in ("three_rodents", "screen_displays", "pink_clouds", "cup_tilted")]
    scores = [row["flow"] for row in scorer("flow").score(paths)]
    assert max(scores[:2]) < 1 < 5 < min(scores[2:])


def test_pairs_are_as_far_apart_as_asked():
    found = pairs(CLIPS / "pink_clouds.mp4", fps=6, most=5)  # 24 frames a second
    assert [pair.seconds for pair in found] == pytest.approx([1 / 6] * 5, abs=0.01)
    assert max(found[0].first.shape) == 576


@pytest.mark.slow
def test_raft_with_weights_of_a_file_runs(tmp_path):
    torch.manual_seed(0)
    network = raft_small(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "raft.pth")
    two = [pair(2, size=(120, 160)), pair(4, size=(120, 160))]
    fields = flow_method(f"raft_small:{tmp_path / 'raft.pth'}")(two)
    assert [field.shape for field in fields] == [(120, 160, 2)] * 2
    assert np.isfinite(fields).all()
    with pytest.raises(UserError, match="no weights of torchvision's raft_large"):
        flow_method(f"raft_large:{tmp_path / 'raft.pth'}")


def test_a_torchscript_network_gets_pixels_and_its_flow_is_scaled_back(tmp_path):
    class Shift(torch.nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
            assert float(first.max()) > 2
            flow = torch.ones_like(first[:, :2]) * torch.tensor([4.0, 2.0]).view(1, 2, 1, 1)
            return [torch.zeros_like(flow), flow]

    torch.jit.script(Shift()).save(tmp_path / "net.pt")
    (field,) = flow_method(f"torchscript:{tmp_path / 'net.pt'}")([pair(size=(64, 200))])
    # the network saw 128 x 200
    assert np.abs(field - (4.0, 1.0)).max() < 1e-5


@pytest.mark.parametrize("name", ["farneback", "raft_small", "torchscript:missing.pt"])
def test_unknown_methods_and_missing_files_are_named(name):
    with pytest.raises(UserError, match=name.split(":")[0]):
        flow_method(name)


@pytest.mark.parametrize("name", ["flow", "static", "camera_motion"])
@pytest.mark.parametrize("settings", [{"fps": 0.0}, {"fps": -3.0}, {"pairs": 0}])
def test_pairs_that_cannot_be_are_refused(name, settings):
    """A negative rate gave scores, of other frames."""
    with pytest.raises(UserError, match=f"{name}.fps=.* and {name}.pairs=.*: fps must be above 0"):
        scorer(name, **settings)
