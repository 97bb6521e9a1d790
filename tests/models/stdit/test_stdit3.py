"""STDiT3: the published counts and names, the equations, frozen parts, the start from PixArt-Sigma.

What every denoiser must do is tested in tests/models/test_denoisers.py.
"""

import pytest
import torch
from safetensors.torch import save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.models.loading import load_weights
from opensora.models.stdit.stdit3 import STDiT3
from opensora.models.stdit.stdit3 import convert as convert_stdit3
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import C_TEXT, TOY, L, build, inputs, sample
from tests.models.stdit import reference

BLOCK = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
BLOCK += ("cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj")
REST = ("x_embedder.proj", "t_block.1", "y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2", "final_layer.linear")
REST += tuple(f"{name}_embedder.mlp.{i}" for name in ("t", "fps") for i in (0, 2))


def lively(**changes) -> STDiT3:
    """A toy model with every weight off its initial value: at first, RMSNorm commutes with rotation."""
    model = build("STDiT3", **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def by_reference(forward, p, cond, numbers, x_mask=None, **settings):
    """The reference's output for the whole batch."""
    outs = []
    for b in range(2):
        one = {name: value[0] for name, value in sample(cond, b).items()}
        if x_mask is not None:
            settings["x_mask"] = x_mask[b]
        given = {name: float(one[name]) for name in numbers}
        outs.append(forward(p, one["x"], y=one["y"][0][one["mask"]], **given, heads=2, **settings))
    return torch.stack(outs)


@pytest.mark.parametrize(("name", "count"), [("STDiT3-XL/2", 1_207_643_936), ("STDiT3-3B/2", 3_182_211_536)])
def test_published_numbers_of_parameters(name, count):
    with torch.device("meta"):
        model = MODELS.build({"type": name})
    assert sum(p.numel() for p in model.parameters()) == count


def test_state_dict_names_are_those_of_released_checkpoints():
    block = [f"{layer}.{kind}" for layer in BLOCK for kind in ("weight", "bias")]
    block += ["scale_shift_table", "attn.q_norm.weight", "attn.k_norm.weight"]
    rest = [f"{layer}.{kind}" for layer in REST for kind in ("weight", "bias")]
    rest += ["y_embedder.y_embedding", "final_layer.scale_shift_table"]
    expected = {f"{axis}_blocks.{i}.{name}" for axis in ("spatial", "temporal") for i in range(2) for name in block}
    assert build("STDiT3").state_dict().keys() == expected | set(rest)


@pytest.mark.parametrize("frames", [None, [[True, False, True], [False, True, True]]])
@pytest.mark.parametrize("settings", [{}, {"qk_norm_legacy": True}, {"qk_norm": False}, {"no_temporal_pos_emb": True}])
def test_the_model_is_its_equations(settings, frames):
    model = lively(**settings)
    cond = inputs(model)
    x_mask = None if frames is None else torch.tensor(frames)
    order = "rope_then_norm" if settings.get("qk_norm_legacy") else "norm_then_rope"
    p = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    expected = by_reference(
        reference.stdit3,
        p,
        cond,
        ("timestep", "height", "width", "fps"),
        x_mask,
        order=None if settings.get("no_temporal_pos_emb") else order,
    )
    # two ways to sum in fp32 over 4 blocks
    torch.testing.assert_close(model(**cond, x_mask=x_mask), expected, atol=2e-5, rtol=1e-4)


def test_spatial_and_temporal_blocks_take_turns():
    model = build("STDiT3")
    assert [block.attn.axis for block in model.transformer_blocks()] == ["space", "time"] * 2
    assert model.transformer_blocks()[3] is model.temporal_blocks[1]


@pytest.mark.parametrize("name", ["height", "width", "fps"])
def test_size_and_rate_are_needed_and_matter(name):
    model = lively()
    cond = inputs(model)
    assert not torch.allclose(model(**cond), model(**{**cond, name: cond[name] + 40}), atol=1e-4)
    with pytest.raises(ValueError, match=f"STDiT3 needs {name}="):
        model(**{**cond, name: None})


def test_the_number_of_frames_is_not_needed():
    model = lively()
    cond = inputs(model)
    assert torch.equal(model(**cond), model(**{**cond, "num_frames": None}))


def test_at_first_temporal_blocks_change_nothing_and_the_rate_is_zero():
    model = MODELS.build({"type": "STDiT3-XL/2", **TOY})
    cond = inputs(model)
    assert model(**cond).abs().max() == 0
    assert not model.fps_embedder(cond["fps"]).any()
    x, y, t = torch.randn(2, 3, 4, 48), torch.randn(2, L, 48), torch.randn(2, 6, 48)
    for block in model.temporal_blocks:
        assert torch.equal(block(x, y, t), x)
    for block in model.spatial_blocks:
        assert not torch.equal(block(x, y, t), x)


def test_only_train_temporal():
    model = build("STDiT3", only_train_temporal=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("temporal_blocks.")}


def test_freeze_y_embedder():
    model = build("STDiT3", freeze_y_embedder=True)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"y_embedder.y_proj.{fc}.{kind}" for fc in ("fc1", "fc2") for kind in ("weight", "bias")}


def test_text_that_is_projected_already_is_refused():
    with pytest.raises(ValueError, match="skip_y_embedder=True is not supported"):
        build("STDiT3", skip_y_embedder=True)


class TestWeights:
    def test_our_own_folder(self, tmp_path):
        model = lively()
        path = save_checkpoint(tmp_path / "c", {"model": model.state_dict()}, state={}, manifest={"step": 1})
        torch.testing.assert_close(build("STDiT3", from_pretrained=str(path)).state_dict(), model.state_dict())

    def test_open_soras_folder(self, tmp_path):
        model = lively()
        save_file({**model.state_dict(), "rope.freqs": torch.ones(12)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        loaded = build("STDiT3", from_pretrained=str(tmp_path))
        cond = inputs(model)
        assert torch.equal(loaded(**cond), model(**cond))

    def test_pixart_sigma_starts_as_that_model(self, tmp_path):
        """For every frame, without the normalisation of queries and keys, whatever the frame rate."""
        state = pixart_file(lively())
        torch.save({"state_dict": state}, tmp_path / "w.pth")
        model = STDiT3(**TOY, qk_norm=False, from_pretrained=str(tmp_path / "w.pth")).eval()
        cond = inputs(model)
        p = {**state, "x_embedder.proj.weight": state["x_embedder.proj.weight"].unsqueeze(2)}
        expected = by_reference(reference.pixart, p, cond, ("timestep", "height", "width"))
        torch.testing.assert_close(model(**cond), expected, atol=2e-5, rtol=1e-4)

    def test_pixart_sigmas_own_model_agrees_on_an_image(self, tmp_path):
        pixart = build("PixArt-Sigma", base_size=3, no_temporal_pos_emb=True)  # 3 = round(sqrt(3 * 4 tokens))
        torch.save(pixart.state_dict(), tmp_path / "w.pth")
        model = STDiT3(**TOY, qk_norm=False, from_pretrained=str(tmp_path / "w.pth")).eval()
        cond = inputs(model, size=(1, 6, 8))
        cond["height"] = cond["width"] = torch.full((2,), 512.0)  # space_scale 1
        torch.testing.assert_close(model(**cond), pixart(**cond), atol=1e-5, rtol=1e-5)

    def test_pixart_sigma_is_reported(self, tmp_path):
        state = pixart_file(lively())
        state["y_embedder.y_embedding"] = torch.randn(3, C_TEXT)
        torch.save({"state_dict": state}, tmp_path / "w.pth")
        model = STDiT3(**TOY)
        table = load_weights(model, tmp_path / "w.pth", convert_stdit3)
        for part in ("PixArt-Sigma", "no temporal blocks", "no frame rate", "does not normalise", "made 3-D", "made 7"):
            assert part in table
        block = model.spatial_blocks[1].state_dict()
        assert torch.equal(block["attn.qkv.weight"], state["blocks.1.attn.qkv.weight"])
        assert torch.equal(block["attn.q_norm.weight"], torch.ones(24))

    def test_latte_is_not_taken_for_pixart(self, tmp_path):
        torch.save(build("LatteT2V").state_dict(), tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"does not fit this STDiT3"):
            build("STDiT3", from_pretrained=str(tmp_path / "w.pth"))

    def test_a_file_that_lost_its_temporal_blocks_is_refused(self, tmp_path):
        state = {name: v for name, v in lively().state_dict().items() if not name.startswith("temporal_blocks.")}
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"(?s)34 missing in the file:.*temporal_blocks\.0\."):
            build("STDiT3", from_pretrained=str(tmp_path / "w.pth"))

    def test_another_depth_is_refused_by_name(self, tmp_path):
        torch.save(lively(depth=3).state_dict(), tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"(?s)does not fit this STDiT3.*spatial_blocks\.2\."):
            build("STDiT3", from_pretrained=str(tmp_path / "w.pth"))


def pixart_file(model):
    """What a PixArt-Sigma file of the model's size could hold."""
    absent = ("temporal_blocks", "fps_embedder", "q_norm", "k_norm")
    state = {n: v.clone() for n, v in model.state_dict().items() if not any(part in n for part in absent)}
    state = {n.replace("spatial_blocks.", "blocks."): v for n, v in state.items()}
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].squeeze(2)
    state["pos_embed"] = torch.zeros(1, 16, 48)
    return state
