import pytest
import torch

from opensora.schedulers.rf.rectified_flow import shift_ratio, shifted


@pytest.mark.parametrize(
    ("t", "height", "width", "latent_frames", "ratio", "expected"),
    [
        # Open-Sora 1.2: t, pixels, latent frames of 1, 51, 102, 51 and 204 frames
        (500, 512, 512, 1, 1.0, 500.0),
        (500, 240, 426, 15, 2.41872, 707.4931),
        (500, 720, 1280, 30, 10.2698, 911.2673),
        (900, 144, 256, 15, 1.45237, 928.9335),
        (100, 720, 1280, 60, 14.52369, 617.4069),
    ],
)
def test_the_references_values(t, height, width, latent_frames, ratio, expected):
    r = shift_ratio("resolution", (latent_frames, height / 8, width / 8))
    assert r == pytest.approx(ratio, rel=1e-5)
    assert 1000 * shifted(t / 1000, r) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(1000 * shifted(torch.tensor([t / 1000]), r), torch.tensor([expected]))


def test_length_is_a_line_in_the_tokens_times_the_root_of_the_frames():
    """Open-Sora 2.0, whose tokens are 2 x 2 cells: 256 tokens have 1, 4096 have 3."""
    assert shift_ratio("length", (1, 32, 32)) == pytest.approx(1.0)
    assert shift_ratio("length", (1, 128, 128)) == pytest.approx(3.0)
    assert shift_ratio("length", (9, 32, 32)) == pytest.approx(3.0)
    assert shift_ratio("length", (4, 64, 64)) == pytest.approx(2 * (1 + 2 * 768 / 3840))


def test_the_scale_and_plain_numbers():
    assert shift_ratio("resolution", (1, 64, 64), scale=1.5) == 1.5
    assert shift_ratio("resolution", (1, 64, 64), base_size=(32, 32)) == 2.0
    assert shift_ratio(3.0, (7, 1, 1)) == 3.0
    assert shift_ratio("none", (7, 1, 1)) == 1.0


@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1.0, 3.0, 1000.0])
def test_ends_stay_and_the_inverse_is_the_inverse_ratio(ratio):
    tau = torch.linspace(0, 1, 101, dtype=torch.float64)
    out = shifted(tau, ratio)
    assert out[0] == 0
    assert out[-1] == 1
    assert (out.diff() > 0).all()
    torch.testing.assert_close(shifted(out, 1 / ratio), tau)
