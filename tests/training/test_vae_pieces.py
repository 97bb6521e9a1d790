"""Lengths are drawn from what is allowed, pieces hold the clips' own frames, and ranks see one whole."""

from collections import Counter

import torch

from opensora.training.vae_pieces import Pieces


def numbered(samples, frames):
    """[B, 3, T, 1, 1]: frame t of sample b holds 100 b + t."""
    values = 100.0 * torch.arange(samples)[:, None] + torch.arange(frames)  # [B, T]
    return values[:, None, :, None, None].expand(-1, 3, -1, -1, -1)


def test_pieces_are_runs_of_the_clips_frames():
    pieces = Pieces([5, 1], seed=3, device="cpu")
    seen = Counter()
    for step in range(40):
        cut, rngs, offset = pieces(numbered(2, 17), [0, 1], step, 0)
        length = cut.shape[2]
        seen[length] += 1
        assert len(cut) == len(rngs) == 2 * (17 // length)
        assert 0 <= offset < 17
        values = cut[:, 0, :, 0, 0]  # [N, L]
        assert (values.diff(dim=1) == 1).all()
        flat = values.flatten().reshape(2, -1)  # the pieces of a clip follow each other
        assert (flat.diff(dim=1) == 1).all()
        assert (flat[:, 0] // 100).tolist() == [0, 1]
    assert set(seen) == {5, 1}
    assert min(seen.values()) > 8


def test_whole_clips_stay_whole():
    cut, rngs, _ = Pieces(None, seed=3, device="cpu")(numbered(3, 7), [0, 1, 2], 5, 0)
    assert torch.equal(cut, numbered(3, 7))
    assert len(rngs) == 3


def test_two_processes_cut_as_one_does():
    pieces = Pieces([4, 2, 1], seed=3, device="cpu")
    video = numbered(4, 9)
    for step in range(6):
        whole, rngs, offset = pieces(video, [0, 1, 2, 3], step, 0)
        parts = [pieces(video[a : a + 2], [a, a + 1], step, 0) for a in (0, 2)]
        assert torch.equal(torch.cat([cut for cut, _, _ in parts]), whole)
        noise = [torch.randn(2, generator=rng) for _, part, _ in parts for rng in part]
        assert torch.equal(torch.stack(noise), torch.stack([torch.randn(2, generator=rng) for rng in rngs]))
        assert {number for _, _, number in parts} == {offset}
