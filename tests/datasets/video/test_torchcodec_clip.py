"""The torchcodec backend: advice where it is not installed, PyAV's frames where it is."""

import importlib.util

import pytest

from opensora.datasets.video.read_video import Decoding, read_frames
from opensora.utils.errors import UserError
from tests.datasets.video.videos import CLIPS

TORCHCODEC = Decoding(backend="torchcodec", hdr="refuse", interlaced="keep", colors="fast")
CLIP = sorted(CLIPS.glob("*.mp4"))[0]


@pytest.mark.skipif(importlib.util.find_spec("torchcodec") is not None, reason="torchcodec is installed")
def test_it_says_how_to_get_it():
    with pytest.raises(
        UserError, match=r"needs the package torchcodec \(pip install torchcodec.*backend='pyav' needs nothing"
    ):
        read_frames(CLIP, 0, 1, decoding=TORCHCODEC)


def test_it_gives_the_frames_of_pyav():
    pytest.importorskip("torchcodec.decoders", exc_type=(ImportError, OSError, RuntimeError))
    one, other = (read_frames(CLIP, 3, 5, 4, decoding).float() for decoding in (Decoding(), TORCHCODEC))
    assert one.shape == other.shape
    assert float((one - other).abs().mean()) < 2  # they round colours differently
    assert float((one[1:] - other[:-1]).abs().mean()) > 2 * float((one - other).abs().mean())
