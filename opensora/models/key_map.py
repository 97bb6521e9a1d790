"""Two-way translation of parameter names: one list of rules reads another code's weights and writes them.

rules = [
    *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
    *layer("blocks.0.attn.qkv", "h.0.to_q", "h.0.to_k", "h.0.to_v", kind="stack"),
    tensor("scale_shift_table", "scale_shift_table"),
]
ours = to_ours(rules, theirs)
theirs = to_theirs(rules, ours)
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from opensora.utils.errors import UserError

Kind = Literal["same", "stack", "copies", "patch"]


class Rule(NamedTuple):
    """One of our tensors, and what it is called elsewhere.

    Kinds: "stack" = theirs, concatenated along the first axis, are ours; "copies" = they hold it several times; "patch" =
    their 2-D patch kernel is our 3-D one of a single frame.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: Kind


def tensor(ours: str, *theirs: str, kind: Kind = "same") -> Rule:
    """The rule of a single tensor."""
    assert len(theirs) == 1 or kind in ("stack", "copies"), f"{ours}: {kind} is about one tensor"
    return Rule(ours, theirs, kind)


def layer(ours: str, *theirs: str, kind: Kind = "same") -> list[Rule]:
    """The rules of a layer: its weight and its bias."""
    return [
        tensor(f"{ours}.weight", *(f"{name}.weight" for name in theirs), kind=kind),
        tensor(f"{ours}.bias", *(f"{name}.bias" for name in theirs), kind="same" if kind == "patch" else kind),
    ]


def block_rules(ours: str, theirs: str) -> list[Rule]:
    """What our block and diffusers' `BasicTransformerBlock` have in common: self-attention and MLP."""
    return [
        *layer(f"{ours}.attn.qkv", *(f"{theirs}.attn1.to_{part}" for part in "qkv"), kind="stack"),
        *layer(f"{ours}.attn.proj", f"{theirs}.attn1.to_out.0"),
        *layer(f"{ours}.mlp.fc1", f"{theirs}.ff.net.0.proj"),
        *layer(f"{ours}.mlp.fc2", f"{theirs}.ff.net.2"),
    ]


def pixart_rules(depth: int) -> list[Rule]:
    """PixArt's names and those of diffusers' `PixArtTransformer2DModel`, for `depth` blocks."""
    embed = "adaln_single.emb"
    rules = [
        *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *layer("t_block.1", "adaln_single.linear"),
        tensor("y_embedder.y_embedding", "caption_projection.y_embedding"),  # in diffusers' first releases
        *layer("final_layer.linear", "proj_out"),
        tensor("final_layer.scale_shift_table", "scale_shift_table"),
    ]
    for i, index in enumerate((0, 2), start=1):
        rules += layer(f"t_embedder.mlp.{index}", f"{embed}.timestep_embedder.linear_{i}")
        rules += layer(f"csize_embedder.mlp.{index}", f"{embed}.resolution_embedder.linear_{i}")
        rules += layer(f"ar_embedder.mlp.{index}", f"{embed}.aspect_ratio_embedder.linear_{i}")
        rules += layer(f"y_embedder.y_proj.fc{i}", f"caption_projection.linear_{i}")
    for i in range(depth):
        ours, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        rules += block_rules(ours, theirs)
        rules += [tensor(f"{ours}.scale_shift_table", f"{theirs}.scale_shift_table")]
        rules += layer(f"{ours}.cross_attn.q_linear", f"{theirs}.attn2.to_q")
        rules += layer(f"{ours}.cross_attn.kv_linear", f"{theirs}.attn2.to_k", f"{theirs}.attn2.to_v", kind="stack")
        rules += layer(f"{ours}.cross_attn.proj", f"{theirs}.attn2.to_out.0")
    return rules


def diffusers_depth(state: Mapping[str, Tensor]) -> int:
    """The number of `transformer_blocks` of a state dict in diffusers' names."""
    return 1 + max((int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks.")), default=-1)


def diffusers_config(model: Any, class_name: str, sample_size: int, **own: Any) -> dict[str, Any]:
    """The `config.json` of a denoiser in diffusers: what its transformers have in common, and what is `own`."""
    if hasattr(model, "caption_channels"):  # PixArt and LatteT2V
        own |= {"norm_type": "ada_norm_single", "cross_attention_dim": model.hidden_size, "attention_bias": True}
        own |= {"caption_channels": model.caption_channels}
    return {
        "_class_name": class_name,
        "num_attention_heads": model.num_heads,
        "attention_head_dim": model.hidden_size // model.num_heads,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "num_layers": len(model.blocks),
        "sample_size": sample_size,
        "patch_size": model.patch_size[1],
        "activation_fn": "gelu-approximate",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        **own,
    }


def refuse_unmet(class_name: str, needed: Mapping[str, bool]) -> None:
    """Raise a UserError with all requirements of a class of diffusers that the model does not meet."""
    if unmet := [requirement for requirement, met in needed.items() if not met]:
        raise UserError(f"diffusers' {class_name} cannot express this model: it needs {'; '.join(unmet)}.")


def patches_along(sample_size: int, patch: int) -> int:
    """Tokens along a side of `sample_size` latent cells; a UserError where it is no multiple of the patch."""
    if sample_size < patch or sample_size % patch:
        raise UserError(f"sample_size={sample_size} must be a multiple of the patch, {patch}.")
    return sample_size // patch


def to_ours(rules: Iterable[Rule], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors in our names. What no rule mentions keeps its name, so that a strict load reports it.

    A UserError where some of the tensors that make up one of ours are missing, or copies that must be equal differ.
    """
    rest: dict[str, Tensor] = dict(state)
    result: dict[str, Tensor] = {}
    for ours, theirs, kind in rules:
        absent = [name for name in theirs if name not in rest]
        if len(absent) == len(theirs):
            continue  # reported as missing by a strict load
        if absent:
            raise UserError(f"the weights are incomplete: {', '.join(absent)} is not there, which {ours} is made of.")
        first, *others = tensors = [rest.pop(name) for name in theirs]
        if kind == "copies" and not all(torch.equal(first, other) for other in others):
            raise UserError(f"{theirs[0]}, {theirs[1]}, ... should be copies of each other, but they differ.")
        # a patch kernel [D, C, p, p] -> [D, C, 1, p, p]
        result[ours] = torch.cat(tensors) if kind == "stack" else first.unsqueeze(2) if kind == "patch" else first
    return result | rest


def to_theirs(rules: Iterable[Rule], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors, with patches of one frame, in their names. What no rule mentions keeps its name."""
    rest: dict[str, Tensor] = dict(state)
    result: dict[str, Tensor] = {}
    for ours, theirs, kind in rules:
        if ours not in rest:
            continue
        value = rest.pop(ours)
        if kind == "stack":
            values = [part.contiguous() for part in value.chunk(len(theirs))]
        elif kind == "patch":
            values = [value.squeeze(2)]
        else:
            values = [value.clone() for _ in theirs]  # safetensors stores no tensor under two names
        result.update(zip(theirs, values, strict=True))
    return result | rest
