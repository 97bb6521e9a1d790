"""The VAE without a network scales stored moments as diffusers' formula does, and refuses everything else."""

import json

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch.testing import assert_close

from opensora.models.vae.scale_only import ScaleOnlyVAE
from opensora.training.batch_encoder import freeze
from opensora.utils.errors import UserError
from opensora.utils.seed import generators, randn_like

CONFIG = {"_class_name": "AutoencoderKLOpenSora", "latent_channels": 4, "scaling_factor": 0.18215, "shift_factor": 0.1}


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def test_moments_are_drawn_and_scaled(tmp_path):
    vae = freeze(ScaleOnlyVAE(write(tmp_path)), torch.device("cpu"))
    moments = torch.randn(2, 8, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    posterior = DiagonalGaussianDistribution(moments)
    noise = randn_like(posterior.mean, generators(3, ids=[0, 1]))
    z = vae.sample(moments, generators(3, ids=[0, 1]))
    assert_close(z, (posterior.mean + posterior.std * noise - 0.1) * 0.18215)
    assert_close(ScaleOnlyVAE(str(tmp_path), posterior="mode").sample(moments), (posterior.mean - 0.1) * 0.18215)


def test_another_scale_has_another_fingerprint(tmp_path):
    one = ScaleOnlyVAE(write(tmp_path)).fingerprint()
    assert ScaleOnlyVAE(str(tmp_path)).fingerprint() == one
    assert ScaleOnlyVAE(write(tmp_path, scaling_factor=0.2)).fingerprint() != one


def test_whatever_needs_a_network_is_refused(tmp_path):
    vae = ScaleOnlyVAE(write(tmp_path))
    for ask in (
        lambda: vae.encode(torch.zeros(1, 3, 5, 8, 8)),
        lambda: vae.sliced_moments(torch.zeros(1, 3, 5, 8, 8)),
        lambda: vae.decode(torch.zeros(1, 4, 2, 1, 1)),
        lambda: vae.decode(torch.zeros(1, 4, 2, 1, 1), 5),
        lambda: vae.latent_size((5, 8, 8)),
    ):
        with pytest.raises(
            UserError, match=r"of AutoencoderKLOpenSora in .* there is only the scale .* docs/reference/vae\.md"
        ):
            ask()


def test_a_config_without_a_scale_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not say scaling_factor, without which"):
        ScaleOnlyVAE(write(tmp_path, scaling_factor=None))
    with pytest.raises(UserError, match=r"has no config\.json"):
        ScaleOnlyVAE(str(tmp_path.parent))
    with pytest.raises(UserError, match="download it and pass that"):
        ScaleOnlyVAE("owner/name")
