"""The linear start: what comes back, what latents look like, that it can be trained, what it refuses."""

import pytest
import torch

from assets.build.linear_start import decoded, start_linearly
from opensora.models.vae import DiffusersVideoVAE
from opensora.models.vae.wan_whole import encode_whole
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

WAN = {
    "type": "AutoencoderKLWan", "base_dim": 48, "decoder_base_dim": 48, "z_dim": 16, "dim_mult": [1, 2, 2],
    "num_res_blocks": 1, "temperal_downsample": [True, True], "is_residual": True, "patch_size": 2, "in_channels": 12,
    "out_channels": 12,
}  # fmt: skip


def smooth_clips(count):
    """[count, 3, 9, 32, 32]: coloured noise of few numbers that drifts."""
    coarse = torch.rand(count, 3, 3, 4, 4, generator=generator(0)) * 1.6 - 0.8
    return torch.nn.functional.interpolate(coarse, (9, 32, 32), mode="trilinear", align_corners=True)


@pytest.fixture(scope="module")
def started():
    torch.manual_seed(0)
    vae = DiffusersVideoVAE(architecture=WAN, posterior="mode")
    clips = smooth_clips(12)
    start_linearly(vae, clips)
    return vae, clips


def test_smooth_clips_come_back_and_latents_have_unit_variance(started):
    vae, clips = started
    error = (decoded(vae, clips) - clips).square().mean((0, 1, 3, 4))  # [T]
    assert (error < 0.1 * clips.square().mean()).all()
    with torch.no_grad():
        mean, logvar = encode_whole(vae.autoencoder, clips).chunk(2, dim=1)
    assert 0.6 < mean[:, :, 0].std() < 1.4
    assert 0.6 < mean[:, :, 1:].std() < 1.4
    torch.testing.assert_close(logvar, torch.full_like(logvar, -6.0), rtol=0, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.slow
def test_it_is_saved_and_trained_as_any_other(started, tmp_path):
    vae, clips = started
    vae.save_pretrained(tmp_path)
    loaded = DiffusersVideoVAE(str(tmp_path), posterior="mode")
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-6)
    losses = []
    for _ in range(4):
        loss = (loaded(clips[:2])[0] - clips[:2]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_another_architecture_is_refused():
    other = DiffusersVideoVAE(architecture={**WAN, "base_dim": 8})
    with pytest.raises(UserError, match="'base_dim': 8"):
        start_linearly(other, smooth_clips(1))
