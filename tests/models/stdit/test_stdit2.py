"""STDiT2: the published count and names, the equations, its micro-conditions, weights of its forerunners.

What every denoiser must do is tested in tests/models/test_denoisers.py.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.models.loading import load_weights
from opensora.models.stdit.stdit2 import STDiT2, size_positions
from opensora.models.stdit.stdit2 import convert as convert_stdit2
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import TOY, build, inputs, sample
from tests.models.stdit import reference

BLOCK = ("attn.qkv", "attn.proj", "attn_temp.qkv", "attn_temp.proj", "mlp.fc1", "mlp.fc2")
BLOCK += ("cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj")
REST = ("x_embedder.proj", "t_block.1", "t_block_temp.1", "y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2")
REST += tuple(f"{name}_embedder.mlp.{i}" for name in ("t", "csize", "ar", "fl", "fps") for i in (0, 2))
NOT_IN_PIXART = ("attn_temp", "temporal", "t_block_temp", "fl_embedder", "fps_embedder", "q_norm", "k_norm")


def lively(**changes) -> STDiT2:
    """A toy model with every weight off its initial value: at first, RMSNorm commutes with rotation."""
    model = build("STDiT2", **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def by_reference(model, cond, x_mask=None, **settings):
    """The reference's output for the whole batch."""
    outs = []
    for b in range(2):
        one = {name: value[0] for name, value in sample(cond, b).items()}
        one["y"] = one["y"][0][one.pop("mask")]
        frames = None if x_mask is None else x_mask[b]
        numbers = {name: float(one[name]) for name in ("timestep", "height", "width", "fps", "num_frames")}
        p = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        outs.append(reference.stdit2(p, one["x"], y=one["y"], **numbers, x_mask=frames, heads=2, **settings))
    return torch.stack(outs)


def test_xl_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = MODELS.build({"type": "STDiT2-XL/2"})
    assert sum(p.numel() for p in model.parameters()) == 767_452_064


def test_state_dict_names_are_those_of_released_checkpoints():
    block = [f"{layer}.{kind}" for layer in BLOCK for kind in ("weight", "bias")]
    block += ["scale_shift_table", "scale_shift_table_temporal"]
    block += [f"{attn}.{norm}.weight" for attn in ("attn", "attn_temp") for norm in ("q_norm", "k_norm")]
    rest = [f"{layer}.{kind}" for layer in (*REST, "final_layer.linear") for kind in ("weight", "bias")]
    rest += ["y_embedder.y_embedding", "final_layer.scale_shift_table"]
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in block} | set(rest)
    assert build("STDiT2").state_dict().keys() == expected


@pytest.mark.parametrize("frames", [None, [[True, False, True], [False, True, True]]])
@pytest.mark.parametrize(
    "settings", [{}, {"norm_order": "rope_then_norm"}, {"qk_norm": False}, {"no_temporal_pos_emb": True}]
)
def test_the_model_is_its_equations(settings, frames):
    model = lively(**settings)
    cond = inputs(model)
    x_mask = None if frames is None else torch.tensor(frames)
    order = None if settings.get("no_temporal_pos_emb") else model.norm_order
    expected = by_reference(model, cond, x_mask, order=order)
    # two ways to sum in fp32 over 2 blocks
    torch.testing.assert_close(model(**cond, x_mask=x_mask), expected, atol=2e-5, rtol=1e-4)


def test_the_two_orders_of_normalisation_and_rotation_differ():
    model, legacy = lively(), lively(norm_order="rope_then_norm")
    legacy.load_state_dict(model.state_dict())
    cond = inputs(model)
    assert not torch.allclose(model(**cond), legacy(**cond), atol=1e-4)


def test_the_two_spellings_of_the_order():
    assert STDiT2(**TOY).norm_order == "norm_then_rope"
    assert STDiT2(**TOY, qk_norm_legacy=False).norm_order == "norm_then_rope"
    assert STDiT2(**TOY, qk_norm_legacy=True).norm_order == "rope_then_norm"
    assert STDiT2(**TOY, qk_norm_legacy=True, norm_order="rope_then_norm").norm_order == "rope_then_norm"
    with pytest.raises(ValueError, match="contradicts qk_norm_legacy=True"):
        STDiT2(**TOY, qk_norm_legacy=True, norm_order="norm_then_rope")
    with pytest.raises(ValueError, match="rope_then_norm"):
        STDiT2(**TOY, norm_order="rope")


@pytest.mark.parametrize("name", ["height", "width", "fps", "num_frames"])
def test_sizes_and_rates_are_needed_and_matter(name):
    model = lively()
    cond = inputs(model)
    assert not torch.allclose(model(**cond), model(**{**cond, name: cond[name] + 40}), atol=1e-4)
    with pytest.raises(ValueError, match=f"STDiT2 needs {name}="):
        model(**{**cond, name: None})


def test_a_width_that_three_sizes_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"hidden_size=32.*multiple of 3"):
        STDiT2(**{**TOY, "hidden_size": 32})


def test_positions_span_the_same_range_at_any_resolution():
    side = torch.tensor([512.0, 256.0])
    table = size_positions(16, (32, 32), side, side, 512)
    counted = size_positions(16, (32, 32), side[:1], side[:1], 512)
    assert table.shape == (2, 32 * 32, 16)
    torch.testing.assert_close(table[0], counted[0])
    # 512 x 512 counts the patches of one row: channel 0 is sin(column)
    torch.testing.assert_close(table[0, :32, 0], torch.arange(32.0).sin())
    # 256 x 256 by 16 x 16 patches: every other position of 512 x 512
    half = size_positions(16, (16, 16), side[1:], side[1:], 512)[0].reshape(16, 16, 16)
    torch.testing.assert_close(half, table[0].reshape(32, 32, 16)[::2, ::2])
    # 2 x 8 patches span what 4 x 4 do: row 1 is at 2, column 1 at 1 / 2
    flat = size_positions(16, (2, 8), side[:1], side[:1], 512)[0].reshape(2, 8, 16)
    torch.testing.assert_close(flat[1, 1, [0, 8]], torch.tensor([0.5, 2.0]).sin())


def test_at_first_the_temporal_branch_and_the_output_are_zero():
    model = MODELS.build({"type": "STDiT2-XL/2", **TOY})
    assert model(**inputs(model)).abs().max() == 0
    for block in model.blocks:
        assert not block.attn_temp.proj.weight.any()
        assert not block.cross_attn.proj.weight.any()
    for layer in (model.t_block[1], model.t_block_temp[1], model.csize_embedder.mlp[2], model.fps_embedder.mlp[0]):
        assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_without_temporal_positions_frames_are_a_set():
    model = lively(no_temporal_pos_emb=True)
    cond = inputs(model)
    flipped = model(**{**cond, "x": cond["x"].flip(2)})
    torch.testing.assert_close(model(**cond).flip(2), flipped, atol=2e-5, rtol=1e-4)


def test_freeze():
    trained = {name for name, p in build("STDiT2", freeze="not_temporal").named_parameters() if p.requires_grad}
    assert "blocks.1.attn_temp.qkv.weight" in trained
    assert "blocks.0.scale_shift_table_temporal" in trained
    assert not [name for name in trained if ".attn." in name or ".mlp.fc" in name or name.startswith("t_embedder")]
    kept = {name for name, p in build("STDiT2", freeze="text").named_parameters() if not p.requires_grad}
    assert kept
    assert all("cross_attn" in name or name.startswith("y_embedder") for name in kept)
    with pytest.raises(ValueError, match="not_temporal"):
        build("STDiT2", freeze="all")


class TestWeights:
    def test_our_own_folder(self, tmp_path):
        model = lively()
        path = save_checkpoint(tmp_path / "c", {"ema": model.state_dict()}, state={}, manifest={"step": 1})
        torch.testing.assert_close(build("STDiT2", from_pretrained=str(path)).state_dict(), model.state_dict())

    def test_open_soras_folder_and_its_order(self, tmp_path):
        model = lively(norm_order="rope_then_norm")
        save_file({**model.state_dict(), "rope.freqs": torch.ones(12)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "STDiT2", "depth": 28}))
        loaded = build("STDiT2", from_pretrained=str(tmp_path), qk_norm_legacy=True)
        cond = inputs(model)
        assert torch.equal(loaded(**cond), model(**cond))
        with pytest.warns(UserWarning, match="norm_order='rope_then_norm'"):
            build("STDiT2", from_pretrained=str(tmp_path))

    def test_pixart_alpha_starts_as_that_model_up_to_the_final_layer(self, tmp_path):
        """STDiT2's final layer does not see the size, PixArt's does: equal once the size's part is zero."""
        state = pixart_file(lively())
        cond, model = inputs(lively()), from_pixart(state, tmp_path)
        tokens = []
        model.final_layer.register_forward_pre_hook(lambda _, args: tokens.append(args[0].detach()))
        model(**cond)
        expected = pixart_by_reference(lambda *args, **kwargs: reference.pixart_tokens(*args, **kwargs)[0], state, cond)
        torch.testing.assert_close(tokens[0], expected, atol=2e-5, rtol=1e-4)

        for name in ("csize_embedder", "ar_embedder"):
            state[f"{name}.mlp.2.weight"].zero_()
            state[f"{name}.mlp.2.bias"].zero_()
        out = from_pixart(state, tmp_path)(**cond)
        torch.testing.assert_close(out, pixart_by_reference(reference.pixart, state, cond), atol=2e-5, rtol=1e-4)

    def test_pixart_ms_own_model_agrees_on_an_image(self, tmp_path):
        pixart = build("PixArtMS", base_size=3, no_temporal_pos_emb=True)  # 3 = round(sqrt(3 * 4 tokens))
        model = from_pixart(pixart.state_dict(), tmp_path)
        cond = inputs(model, size=(1, 6, 8))
        cond["height"] = cond["width"] = torch.full((2,), 512.0)  # space_scale 1
        tokens = []
        for each in (model, pixart):
            each.final_layer.register_forward_pre_hook(lambda _, args: tokens.append(args[0].detach()))
            each(**cond)
        torch.testing.assert_close(*tokens, atol=1e-5, rtol=1e-5)

    def test_pixart_without_sizes_and_what_is_left_is_reported(self, tmp_path):
        sizeless = {n: v for n, v in pixart_file(lively()).items() if not n.startswith(("csize", "ar_"))}
        torch.save({"state_dict": sizeless}, tmp_path / "w.pth")
        model = MODELS.build({"type": "STDiT2-XL/2", **TOY})
        table = load_weights(model, tmp_path / "w.pth", convert_stdit2)
        for part in ("PixArt-alpha", "no temporal branch", "does not normalise", "no sizes", "made 3-D", "recomputed"):
            assert part in table

    def test_stdit_gives_what_both_have(self, tmp_path):
        old = build("STDiT")
        torch.save(old.state_dict(), tmp_path / "w.pth")
        model = STDiT2(**TOY)
        table = load_weights(model, tmp_path / "w.pth", convert_stdit2)
        assert "(STDiT)" in table
        assert "STDiT has no such part" in table
        new = model.state_dict()
        torch.testing.assert_close({name: new[name] for name in old.state_dict()}, dict(old.state_dict()))

    def test_weights_with_a_hole_are_refused(self, tmp_path):
        state = lively().state_dict()
        del state["blocks.1.attn_temp.q_norm.weight"]
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"(?s)1 missing in the file:.*blocks\.1\.attn_temp\.q_norm\.weight"):
            build("STDiT2", from_pretrained=str(tmp_path / "w.pth"))


def pixart_file(model):
    """What a PixArt-alpha MS file of the model's size could hold."""
    state = {n: v.clone() for n, v in model.state_dict().items() if not any(part in n for part in NOT_IN_PIXART)}
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].squeeze(2)
    state["pos_embed"] = torch.zeros(1, 16, 48)
    return state


def from_pixart(state, tmp_path):
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    return STDiT2(**TOY, qk_norm=False, from_pretrained=str(tmp_path / "w.pth")).eval()


def pixart_by_reference(forward, state, cond):
    p = {**state, "x_embedder.proj.weight": state["x_embedder.proj.weight"].unsqueeze(2)}
    outs = []
    for b in range(2):
        one = {name: value[0] for name, value in sample(cond, b).items()}
        numbers = {name: float(one[name]) for name in ("timestep", "height", "width")}
        outs.append(forward(p, one["x"], y=one["y"][0][one["mask"]], **numbers, heads=2))
    return torch.stack(outs)
