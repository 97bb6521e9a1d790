"""The quickstart's measure against cases worked out by hand."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from tools.quickstart.images import Row, contact_sheet, loss_curve
from tools.quickstart.measure import best_frame_psnr, distance, nearest, psnr


def flat(*values: float) -> torch.Tensor:
    """A video of plain frames: [3, T, 16, 24]."""
    return torch.tensor(values)[None, :, None, None].expand(3, -1, 16, 24).contiguous()


def test_distance_is_zero_where_a_window_matches():
    clip = flat(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert distance(flat(0.1, 0.3, 0.5), clip, 2) < 1e-12
    assert distance(flat(0.1, 0.2, 0.3), clip, 2) == pytest.approx((0.1**2 + 0 + 0.1**2) / 3, rel=1e-4)


def test_distance_averages_texture_away():
    noise = torch.randn(3, 1, 16, 24)
    noise -= noise.reshape(3, 1, 2, 8, 3, 8).mean((3, 5)).repeat_interleave(8, 2).repeat_interleave(8, 3)
    assert distance(flat(0.5) + noise, flat(0.5), 1) < 1e-10


def test_a_clip_shorter_than_the_sample_is_an_error():
    with pytest.raises(ValueError, match="no window of 3 at interval 2"):
        distance(flat(0, 0, 0), flat(0, 0, 0, 0), 2)


def test_nearest():
    clips = [flat(0.0, 0.0), flat(0.5, 0.5), flat(-0.5, 0.5)]
    assert nearest(flat(0.4, 0.5), clips, 1) == 1
    assert nearest(flat(-0.4, 0.5), clips, 1) == 2


def test_psnr_by_hand():
    assert float(psnr(torch.tensor(0.04))) == pytest.approx(20)
    assert best_frame_psnr(flat(0.2, 0.6), flat(0.0, 0.5)) == pytest.approx(
        (10 * math.log10(4 / 0.04) + 10 * math.log10(4 / 0.01)) / 2, rel=1e-3
    )


def test_contact_sheet_shows_the_frames(tmp_path):
    contact_sheet([Row([("a long text " * 20, flat(-1.0, 0.0, 1.0)), ("b", flat(1.0, 1.0, 1.0))])], tmp_path / "s.png")
    pixels = np.asarray(Image.open(tmp_path / "s.png"))
    assert pixels.shape == (16 + 3 * 14 + 6, 2 * (3 * 24 + 12), 3)
    assert [int(pixels[50, 6 + 24 * i + 12, 0]) for i in range(3)] == [0, 128, 255]


@pytest.mark.parametrize("held_out", [True, False])
def test_loss_curve_joins_a_run_and_its_continuation(tmp_path, held_out):
    for name, steps in (("a", (1, 2, 3)), ("b", (3, 4))):
        entries = [{"step": s, "loss": 1 / s} for s in steps] + [
            {"step": s, "val/loss": 0.5} for s in steps if held_out
        ]
        (tmp_path / name).write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    loss_curve([tmp_path / "a", tmp_path / "b"], tmp_path / "loss.png")
    pixels = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB"))
    assert pixels.shape == (480, 840, 3)
    assert (pixels == (31, 119, 180)).all(2).any()  # the moving average
    assert (pixels == (255, 127, 14)).all(2).any() == held_out
