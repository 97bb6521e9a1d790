"""HDR tone mapping against the numbers of the standards."""

import numpy as np
import pytest

from opensora.datasets.video.color import (
    HLG,
    LUMA_2020,
    PQ,
    TO_709,
    bend,
    hlg_to_scene,
    nits_to_pq,
    pq_to_nits,
    tone_map,
)


def codes(signal) -> np.ndarray:
    return np.rint(np.asarray(signal) * 65535).astype(np.uint16)


@pytest.mark.parametrize(("signal", "nits"), [(0, 0), (0.508, 100), (0.5807, 203), (0.7518, 1000), (1, 10_000)])
def test_pq_has_the_levels_of_the_standard(signal, nits):
    """ITU-R BT.2408, table 1 and BT.2100: 203 cd/m2 is 58 % PQ, 1000 is 75 %."""
    assert pq_to_nits(np.array(signal)) == pytest.approx(nits, rel=2e-3, abs=1e-6)
    assert nits_to_pq(np.array(nits)) == pytest.approx(signal, abs=2e-4)


def test_hlg_has_the_levels_of_the_standard():
    """BT.2100: 1/12 of the scene's light is 50 %; BT.2408: a white page of 203 cd/m2 is 75 %."""
    assert hlg_to_scene(np.array([0, 0.5, 1])) == pytest.approx([0, 1 / 12, 1], abs=1e-6)
    scene = float(hlg_to_scene(np.array(0.75)))
    assert 1000 * scene**1.2 == pytest.approx(203, rel=5e-3)


def test_primaries_keep_white_and_light():
    assert TO_709.sum(1) == pytest.approx(np.ones(3), abs=2e-4)  # white stays white
    assert np.array([0.2126, 0.7152, 0.0722]) @ TO_709 == pytest.approx(LUMA_2020, abs=2e-3)  # and luminance luminance


def test_the_curve_leaves_the_dark_alone_and_ends_at_the_screens_white():
    nits = np.linspace(0, 1000, 2001)
    bent = bend(nits)
    assert bent[nits < 80] == pytest.approx(nits[nits < 80], rel=1e-6)
    assert bent[-1] == pytest.approx(203, rel=1e-3)
    assert (np.diff(bent) > 0).all()
    assert (bent <= nits + 1e-9).all()
    assert bend(np.array([4000.0])) == pytest.approx(203, rel=1e-3)  # brighter than the master says


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_grey_stays_grey_and_in_order(transfer):
    grey = np.linspace(0, 1, 500)
    out = tone_map(codes(np.repeat(grey[:, None], 3, 1)), transfer).astype(int)
    assert np.ptp(out, axis=1).max() <= 1
    assert (np.diff(out[:, 1]) >= 0).all()
    assert out[0, 0] == 0
    assert out[-1, 0] == 255


def test_a_grey_card_has_the_same_grey_in_both():
    """BT.2408, table 1: a card of 18 % is 26 cd/m2, 38 % PQ and 38 % HLG."""
    expected = 255 * (26 / 203) ** (1 / 2.4)
    for transfer in (PQ, HLG):
        assert np.abs(tone_map(codes(np.full((1, 3), 0.38)), transfer) - expected).max() < 4


def test_colours_of_a_small_screen_come_back():
    """BT.709 light below the knee, put into BT.2020 PQ, comes back."""
    rng = np.random.default_rng(0)
    signal = rng.uniform(0.1, 0.6, (200, 3))
    light = signal**2.4 * 203  # at most 60 cd/m2
    wide = light @ np.linalg.inv(TO_709.astype(np.float64)).T
    assert np.abs(tone_map(codes(nits_to_pq(wide)), PQ) - 255 * signal).max() <= 1
