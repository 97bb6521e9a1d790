"""diffusers' PixArt at toy size."""

import torch

from tests.models.denoisers import C_TEXT

SIDE = 8  # of the latent that the diffusers models below are for


def theirs(micro_conditions: bool, scale: float):
    from diffusers import PixArtTransformer2DModel

    torch.manual_seed(3)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 24, "cross_attention_dim": 48, "num_layers": 2}
    return PixArtTransformer2DModel(
        **sizes,
        caption_channels=C_TEXT,
        sample_size=SIDE,
        interpolation_scale=scale,
        use_additional_conditions=micro_conditions,
    ).eval()


def their_output(model, cond):
    sizes = None
    if model.use_additional_conditions:
        size = torch.stack([cond["height"], cond["width"]], dim=1)
        sizes = {"resolution": size, "aspect_ratio": size[:, :1] / size[:, 1:]}
    return model(
        cond["x"][:, :, 0],
        encoder_hidden_states=cond["y"][:, 0],
        timestep=cond["timestep"],
        added_cond_kwargs=sizes,
        encoder_attention_mask=cond["mask"],
    ).sample
