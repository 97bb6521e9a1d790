"""Which architecture wrote a file, told from its tensors' names: for the message when weights do not fit.

The one place that knows all architectures' names at once; loading itself never guesses.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor


class Signature(NamedTuple):
    """What an architecture's names have, and have not, as pieces of names as `star` writes them."""

    architecture: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


SIGNATURES = (  # the first that fits is taken
    Signature("a LoRA, which goes into a model with --lora or tools/lora.py,", ("lora_A.",)),
    Signature("NOVA", ("image_decoder.", "mask_embed.")),
    Signature("STDiT3", ("spatial_blocks.*.", "temporal_blocks.*.")),
    Signature("LatteT2V", ("blocks.*.cross_attn.", "temporal_blocks.*.")),
    Signature("LatteT2V in diffusers' names", ("temporal_transformer_blocks.*.",)),
    Signature("STDiT2", ("blocks.*.attn_temp.", "t_block_temp.")),
    Signature("STDiT", ("blocks.*.attn_temp.",), ("t_block_temp.",)),
    Signature("PixArtMS", ("blocks.*.cross_attn.", "csize_embedder."), ("attn_temp.",)),
    Signature("PixArt-Sigma with compressed keys", ("blocks.*.cross_attn.", "blocks.*.attn.sr."), ("attn_temp.",)),
    Signature("PixArt", ("blocks.*.cross_attn.", "t_block."), ("attn_temp.",)),
    Signature("PixArt in diffusers' names", ("transformer_blocks.*.attn2.", "adaln_single.")),
    Signature("Latte", ("blocks.*.adaLN_modulation.", "temp_embed")),
    Signature("DiT or Latte, which share their names", ("blocks.*.adaLN_modulation.", "t_embedder.")),
    Signature("DiT in diffusers' names", ("transformer_blocks.*.norm1.emb.class_embedder.",)),
    Signature("FLUX or Open-Sora 2", ("double_blocks.*.", "single_blocks.*.")),
    Signature("a VAE", ("encoder.", "decoder.", "conv_in."), ("transformer_blocks.",)),
    Signature("a U-Net", ("down_blocks.*.", "mid_block.", "up_blocks.*."), ("encoder.",)),
    Signature("a T5 text encoder", ("block.*.layer.*.SelfAttention.",)),
    Signature("a CLIP text encoder", ("text_model.encoder.",)),
    Signature("an optimizer's state", ("/exp_avg",)),
)


def recognise(state: Mapping[str, Tensor]) -> str | None:
    """`PixArt (blocks.*.cross_attn, t_block, no attn_temp), 28 blocks of width 1152`; None = no known one."""
    names = "\n".join(sorted({star(name) for name in state}))
    for signature in SIGNATURES:
        if all(piece in names for piece in signature.has) and not any(piece in names for piece in signature.lacks):
            evidence = [*signature.has, *(f"no {piece}" for piece in signature.lacks)]
            return f"{signature.architecture} ({', '.join(piece.rstrip('.*') for piece in evidence)}){_size(state)}"
    return None


def star(name: str) -> str:
    """A tensor's name with the numbers of blocks and layers written `*`: `blocks.*.mlp.fc1.weight`."""
    return re.sub(r"((?:block|layer)s?)\.\d+(?=\.)", r"\1.*", name)


def _size(state: Mapping[str, Tensor]) -> str:
    depths: dict[str, int] = {}
    for name in state:
        if found := re.match(r"((?:\w*_)?blocks)\.(\d+)\.", name):
            depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
    parts = [f"{depth} {blocks.replace('_', ' ')}" for blocks, depth in sorted(depths.items())]
    width = _width(state, ("x_embedder.proj.bias", "pos_embed.proj.bias"))
    return (f", {' and '.join(parts)}" if parts else "") + (f" of width {width}" if parts and width else "")


def _width(state: Mapping[str, Tensor], names: Iterable[str]) -> int | None:
    return next((len(state[name]) for name in names if name in state and state[name].ndim == 1), None)
