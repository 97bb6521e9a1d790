"""Tiles: exact where a network sees no further than a quarter of the overlap, near on trained weights."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from opensora.datasets.video.read_video import read_frames
from opensora.models.vae import VideoAutoencoderKL
from opensora.models.vae.splitting import check_tile_size, chunk_lengths, tiled
from opensora.utils.errors import UserError
from opensora.utils.seed import generator
from tests.models.vaes import build


def pool(x):
    return F.avg_pool3d(x, (1, 4, 4))


def grow(z):
    return F.interpolate(z, scale_factor=(1, 4, 4))


def test_chunks_are_whole_but_for_the_last():
    assert chunk_lengths(21, 9) == [9, 9, 3]
    assert chunk_lengths(18, 9) == [9, 9]
    assert chunk_lengths(21, None) == [21]


@pytest.mark.parametrize("size", [(64, 64), (32, 32), (36, 100), (68, 32), (128, 44)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5])
def test_networks_that_see_one_cell_are_exact(size, overlap):
    x = torch.rand(2, 3, 2, *size, generator=generator(0))
    z = tiled(pool, x, 32, overlap, (4, 4), decoding=False)
    assert_close(z, pool(x))
    assert_close(tiled(grow, z, 32, overlap, (4, 4), decoding=True), grow(z))


@pytest.mark.parametrize("length", range(4, 300, 12))
def test_tiles_cover_an_image_and_have_one_size(length):
    """The network learns where a tile begins from what it is given: every pixel holds its own column."""
    starts, sides = [], set()

    def network(x):
        starts.append(int(x[0, 0, 0, 0, 0]))
        sides.add(tuple(x.shape[-2:]))
        return x

    x = torch.arange(float(length)).expand(1, 3, 1, 32, length)
    assert_close(tiled(network, x, 32, 0.25, (1, 1), decoding=False), x)
    assert sides == {(32, min(length, 32))}
    assert starts[0] == 0
    assert starts[-1] == max(length - 32, 0)
    assert all(8 <= start + 32 - after <= 32 for start, after in pairwise(starts))


def test_neighbours_blend_linearly_and_their_rims_count_nothing():
    """Two tiles of which one gives zeros and the other ones: the result is the second one's weight."""
    calls = []

    def network(x):
        calls.append(x)
        return torch.full_like(x, len(calls) - 1.0)

    weight = tiled(network, torch.zeros(1, 1, 64, 112), 64, 0.25, (1, 1), decoding=False)[0, 0, 0]
    assert weight[: 48 + 4].max() == 0  # the second tile begins at 48; a quarter of the overlap of 16 is 4
    assert weight[64 - 4 :].min() == 1
    assert_close(weight[52:60], (torch.arange(8) + 0.5) / 8)


def reach(network, x) -> int:
    """How far from its own position the middle of the output looks, in entries of x, along the height."""
    x = x.clone().requires_grad_(True)
    out = network(x)
    middle = out.shape[-2] // 2
    out[..., middle, :].sum().backward()
    seen = x.grad.abs().amax((0, 1, 2, 4)).nonzero().flatten()
    scale = x.shape[-2] / out.shape[-2]
    return int(max(middle * scale - seen.min(), seen.max() - middle * scale)) + 1


def test_a_convolutional_vae_is_exact():
    """LTX has no attention, and normalises pixel by pixel."""
    plain = build("KLLTXVideo", posterior="mode")
    x = torch.rand(1, 3, 3, 480, 16, generator=generator(0)) * 2 - 1
    z = plain.encode(x)
    cells = plain.strides[1]
    assert reach(plain.moments, x) <= 160 / 4  # pixels: a quarter of the overlap
    assert reach(lambda z: plain.decode(z, 3), z) <= 160 / 4 / cells
    exact = build("KLLTXVideo", posterior="mode", tile_size=320, tile_overlap=0.5)
    assert_close(exact.encode(x), z, rtol=1e-4, atol=1e-5)
    assert_close(exact.decode(z, 3), plain.decode(z, 3), rtol=1e-4, atol=1e-5)
    short = build("KLLTXVideo", posterior="mode", tile_size=64, tile_overlap=0.0)
    assert (short.encode(x) - z).abs().max() > 1e-2


@pytest.mark.slow
@torch.no_grad()
def test_seams_of_a_trained_vae_cannot_be_seen(repo_root):
    """A real image in tiles of 128: group normalisation makes tiles differ, but less than the VAE errs, and nowhere
    abruptly."""
    folder = str(repo_root / "assets" / "models" / "vae-quickstart")
    plain, blended, butted = (
        VideoAutoencoderKL(folder, posterior="mode", **settings).eval()
        for settings in ({}, {"tile_size": 128}, {"tile_size": 128, "tile_overlap": 0.0})
    )
    frame = read_frames(repo_root / "assets" / "clips" / "meadow_run.mp4", 0, 1)  # [1, 3, H, W] uint8
    frame = frame if frame.shape[1] == 3 else frame.movedim(-1, 1)
    x = F.interpolate(frame.float() / 127.5 - 1, size=(192, 256), mode="area").unsqueeze(2)  # [1, 3, 1, H, W]
    z = plain.encode(x)
    decoded = plain.decode(z, 1)
    assert psnr(blended.decode(z, 1), decoded) > 37
    assert psnr(blended.decode(blended.encode(x), 1), decoded) > 40
    assert psnr(decoded, x) < 30
    assert seam(blended.decode(z, 1) - decoded) < 5
    assert seam(butted.decode(z, 1) - decoded) > 15


def seam(error):
    """The steepest column of an error over its mean column."""
    steps = error.diff(dim=-1).abs().mean((0, 1, 2, 3))
    return float(steps.max() / steps.mean())


def psnr(a, b):
    return float(10 * torch.log10(4 / (a - b).square().mean()))


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(UserError, match="tile_size=20 is no multiple of the VAE's 8 pixels; try 16"):
        check_tile_size(20, (8, 8))
