"""Rules read another code's weights and write them."""

import pytest
import torch

from opensora.models.key_map import layer, tensor, to_ours, to_theirs
from opensora.utils.errors import UserError

RULES = [
    *layer("x.proj", "pos_embed.proj", kind="patch"),
    *layer("attn.qkv", "to_q", "to_k", "to_v", kind="stack"),
    tensor("norm.weight", "their_norm.weight"),
    tensor("classes", "block.0.classes", "block.1.classes", kind="copies"),
    tensor("table", "table"),
]


def ours():
    return {
        "x.proj.weight": torch.randn(4, 3, 1, 2, 2),
        "x.proj.bias": torch.randn(4),
        "attn.qkv.weight": torch.randn(12, 4),
        "attn.qkv.bias": torch.randn(12),
        "norm.weight": torch.randn(4),
        "classes": torch.randn(5, 4),
        "table": torch.randn(6, 4),
    }


def test_there_and_back_is_exact():
    state = ours()
    theirs = to_theirs(RULES, state)
    assert theirs["pos_embed.proj.weight"].shape == (4, 3, 2, 2)
    assert torch.equal(theirs["to_k.weight"], state["attn.qkv.weight"][4:8])
    assert torch.equal(theirs["block.1.classes"], state["classes"])
    assert set(theirs) == {name for rule in RULES for name in rule.theirs}
    back = to_ours(RULES, theirs)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_names_without_a_rule_pass_through_both_ways():
    assert to_ours(RULES, {"z": torch.zeros(1)}).keys() == {"z"}
    assert to_theirs(RULES, {"z": torch.zeros(1)}).keys() == {"z"}


def test_what_is_missing_altogether_is_left_to_the_strict_load():
    theirs = to_theirs(RULES, ours())
    del theirs["their_norm.weight"]
    assert "norm.weight" not in to_ours(RULES, theirs)


@pytest.mark.parametrize("absent", ["to_k.bias", "block.1.classes"])
def test_weights_of_which_a_part_is_missing_are_refused(absent):
    theirs = to_theirs(RULES, ours())
    del theirs[absent]
    with pytest.raises(UserError, match=f"incomplete: {absent} is not there"):
        to_ours(RULES, theirs)


def test_copies_must_agree():
    theirs = to_theirs(RULES, ours())
    theirs["block.1.classes"] = theirs["block.1.classes"] + 1
    with pytest.raises(UserError, match=r"block\.0\.classes, block\.1\.classes, ... should be copies"):
        to_ours(RULES, theirs)


def test_a_single_tensor_has_a_single_name():
    with pytest.raises(AssertionError, match="same is about one tensor"):
        tensor("a", "b", "c")
