"""Two-way translation of parameter names: one list of rules reads another code's weights and writes them.

A rule says which of our tensors is which of theirs, for one architecture of a given depth. `layer` makes the rules of a
layer's weight and bias, `tensor` that of a single tensor:

    rules = [
        *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *layer("blocks.0.attn.qkv", "h.0.to_q", "h.0.to_k", "h.0.to_v", kind="stack"),
        tensor("scale_shift_table", "scale_shift_table"),
    ]
    ours = to_ours(rules, theirs)
    theirs = to_theirs(rules, ours)
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from opensora.utils.errors import UserError

Kind = Literal["same", "stack", "copies", "patch"]


class Rule(NamedTuple):
    """One of our tensors, and what it is called elsewhere.

    Kinds: "same" = one tensor under another name; "stack" = theirs, concatenated along the first axis, are ours;
    "copies" = they hold it several times; "patch" = their 2-D patch kernel is our 3-D one of a single frame (the bias
    of such a layer is "same").
    """

    ours: str
    theirs: tuple[str, ...]
    kind: Kind


def tensor(ours: str, *theirs: str, kind: Kind = "same") -> Rule:
    """The rule of a single tensor."""
    assert len(theirs) == 1 or kind in ("stack", "copies"), f"{ours}: {kind} is about one tensor"
    return Rule(ours, theirs, kind)


def layer(ours: str, *theirs: str, kind: Kind = "same", bias: bool = True) -> list[Rule]:
    """The rules of a layer: its weight and, if it has one, its bias."""
    rules = [tensor(f"{ours}.weight", *(f"{name}.weight" for name in theirs), kind=kind)]
    if bias:
        kind_of_bias: Kind = "same" if kind == "patch" else kind
        rules.append(tensor(f"{ours}.bias", *(f"{name}.bias" for name in theirs), kind=kind_of_bias))
    return rules


def to_ours(rules: Iterable[Rule], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors in our names. What no rule mentions keeps its name, so that a strict load reports it.

    Raises:
        UserError: a tensor that must be whole is there in part, or copies that must be equal differ.
    """
    rest = dict(state)
    result: dict[str, Tensor] = {}
    for rule in rules:
        found = [name for name in rule.theirs if name in rest]
        if not found:
            continue  # reported as missing by a strict load
        if len(found) < len(rule.theirs):
            absent = ", ".join(sorted(set(rule.theirs) - set(found)))
            raise UserError(f"the weights are incomplete: {found[0]} is there, but {absent} is not.")
        result[rule.ours] = _read(rule, [rest.pop(name) for name in rule.theirs])
    return result | rest


def to_theirs(rules: Iterable[Rule], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors in their names. What no rule mentions keeps its name."""
    rest = dict(state)
    result: dict[str, Tensor] = {}
    for rule in rules:
        if rule.ours not in rest:
            continue
        result.update(zip(rule.theirs, _write(rule, rest.pop(rule.ours)), strict=True))
    return result | rest


def _read(rule: Rule, tensors: list[Tensor]) -> Tensor:
    if rule.kind == "stack":
        return torch.cat(tensors)
    if rule.kind == "patch":
        return tensors[0].unsqueeze(2)  # [D, C, p, p] -> [D, C, 1, p, p]
    for name, other in zip(rule.theirs[1:], tensors[1:], strict=True):
        if not torch.equal(tensors[0], other):
            raise UserError(f"{rule.theirs[0]} and {name} should be copies of each other, but they differ.")
    return tensors[0]


def _write(rule: Rule, tensor: Tensor) -> list[Tensor]:
    if rule.kind == "stack":
        return [part.contiguous() for part in tensor.chunk(len(rule.theirs))]
    if rule.kind == "patch":
        if tensor.shape[2] != 1:
            raise UserError(
                f"{rule.ours} covers {tensor.shape[2]} frames; the format to be written has patches of one frame only."
            )
        return [tensor.squeeze(2)]
    return [tensor] * len(rule.theirs)
