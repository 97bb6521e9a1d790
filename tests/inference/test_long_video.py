"""How segments of a long video overlap, for VAEs of every kind of clock."""

from dataclasses import replace

import pytest
import torch

from opensora.inference.build import build_components
from opensora.inference.pipeline import begin_with
from opensora.inference.sizes import Overlap, overlap
from opensora.utils.errors import UserError


class FrameByFrame:
    """Open-Sora 1.0 and 1.1."""

    chunk_latent_frames = 1

    def latent_frames(self, n):
        return n

    video_frames = latent_frames

    def legal_num_frames(self, n):
        return n


class Chunks:
    """Open-Sora 1.2: 17 frames are 5 latent ones."""

    chunk_latent_frames = 5

    def latent_frames(self, n):
        return n // 17 * 5 + -(-(n % 17) // 4)

    def video_frames(self, latent):
        return latent // 5 * 17 + latent % 5 * 4

    def legal_num_frames(self, n):
        return n


class Causal:
    """4k + 1 frames, the first by itself."""

    chunk_latent_frames = None

    def latent_frames(self, n):
        return (n - 1) // 4 + 1

    def video_frames(self, latent):
        return 4 * (latent - 1) + 1

    def legal_num_frames(self, n):
        return (n - 1) // 4 * 4 + 1


@pytest.mark.parametrize(
    ("vae", "num_frames", "length", "expected"),
    [
        (FrameByFrame(), 16, 4, Overlap(4, 4, keeps_latents=True)),
        (FrameByFrame(), 16, None, Overlap(4, 4, keeps_latents=True)),  # as Open-Sora 1.1
        (FrameByFrame(), 3, None, Overlap(1, 1, keeps_latents=True)),
        (Chunks(), 51, None, Overlap(5, 17, keeps_latents=True)),  # as Open-Sora 1.2
        (Chunks(), 102, 10, Overlap(10, 34, keeps_latents=True)),
        (Chunks(), 60, 5, Overlap(5, 17, keeps_latents=False)),  # its last chunk is not whole
        (Causal(), 17, 2, Overlap(2, 5, keeps_latents=False)),  # as a beginning, a latent frame means something else
        (Causal(), 49, None, Overlap(3, 9, keeps_latents=False)),
    ],
)
def test_overlaps_follow_the_vae(vae, num_frames, length, expected):
    assert overlap(vae, num_frames, length) == expected


@pytest.mark.parametrize(
    ("vae", "num_frames", "length", "message"),
    [
        (Chunks(), 51, 4, "multiple of 5; the nearest is 5"),
        (Chunks(), 17, None, r"segments of 17 frames \(5 latent frames\) cannot share 5"),
        (FrameByFrame(), 16, 16, "cannot share 16"),
        (FrameByFrame(), 1, None, "raise num_frames"),
        (Causal(), 1, None, "raise num_frames"),
    ],
)
def test_what_cannot_overlap_is_refused(vae, num_frames, length, message):
    with pytest.raises(UserError, match=message):
        overlap(vae, num_frames, length)


def test_an_overlap_begins_as_a_segment_does():
    """One chunk, filled up in front: 51 frames are 13 latent ones, the first of which stands for three."""

    class Whole(Chunks):
        chunk_latent_frames = None

        def latent_frames(self, n):
            return -(-n // 4)

        def video_frames(self, latent):
            return 4 * latent

    assert overlap(Whole(), 51, 3) == Overlap(3, 11, keeps_latents=False)
    assert overlap(Whole(), 52, 3) == Overlap(3, 12, keeps_latents=False)


def test_what_is_taken_over_is_at_the_start(caplog):
    z, taken = torch.randn(2, 3, 5, 2, 2), torch.randn(2, 3, 2, 2, 2)
    begun, mask = begin_with(taken, z, None, 0.0)
    assert torch.equal(begun[:, :, :2], taken)
    assert torch.equal(begun[:, :, 2:], z[:, :, 2:])
    assert mask.tolist() == [[False, False, True, True, True]] * 2
    assert not caplog.records
    given = torch.tensor([[True] * 5, [False, True, True, True, False]])
    _, mask = begin_with(taken, z, given, 0.0)
    assert mask.tolist() == [[False, False, True, True, True], [False, False, True, True, False]]
    _, mask = begin_with(taken, z, given, 0.4)
    torch.testing.assert_close(mask, torch.tensor([[0.4, 0.4, 1, 1, 1], [0.4, 0.4, 1, 1, 0]]))
    assert given.dtype == torch.bool
    assert "1 latent frames of references have no effect" in caplog.text


def test_what_a_segment_cannot_share_is_reported_before_the_text_encoder_is_loaded(cfg):
    cfg.text_encoder["from_pretrained"] = "./nowhere"
    cfg = replace(cfg, loop=2, condition_frame_length=4)
    with pytest.raises(UserError, match=r"segments of 4 frames .* cannot share 4 latent frames"):
        build_components(cfg)
