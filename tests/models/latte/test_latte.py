"""Latte: sizes, what attends to what, where time enters, and its weights, official ones and DiT's."""

import pytest
import torch
from safetensors.torch import save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.models.dit.dit import DiT, convert
from opensora.models.latte.latte import Latte
from opensora.models.layers.positions import sincos_1d
from opensora.models.loading import load_weights
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import awake

TOY = {"depth": 4, "hidden_size": 48, "num_heads": 2, "caption_channels": 16}
CLASSES = "y_embedder.embedding_table.weight"


def toy(name="Latte-XL/2", seed=0, **changes) -> DiT:
    torch.manual_seed(seed)
    return awake(MODELS.build({"type": name, "condition": "label_10", **TOY, **changes}))


def official(model: DiT, **tables: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model's weights with 2-D patch kernels and stored position tables."""
    state = dict(model.state_dict())
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].squeeze(2)
    return {"pos_embed": torch.zeros(1, 16, model.hidden_size), **tables, **state}


def written(model: DiT, model_type: str, form: str, path) -> str:
    """The model as a checkpoint of a run or as a file of tools.convert, which say what they are of."""
    if form == "checkpoint":
        return str(save_checkpoint(path, {"ema": model.state_dict()}, state={}, manifest={"model": model_type}))
    save_file(model.state_dict(), path, metadata={"model": model_type})
    return str(path)


def load(model: DiT, state, folder) -> str:
    torch.save(state, folder / "w.pt")
    return load_weights(model, folder / "w.pt", convert)


def inputs(size=(3, 6, 8)):
    rng = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, *size, generator=rng), torch.tensor([3, 641]), torch.tensor([7, 10])[:, None, None, None]


def close_gates(blocks) -> None:
    """Make these blocks the identity."""
    with torch.no_grad():
        for block in blocks:
            for parameter in block.adaLN_modulation.parameters():
                parameter.zero_()


# the released code counts the tables of a 32 x 32 latent and 16 frames: 674.11 M and 673.99 M
@pytest.mark.parametrize(("condition", "count"), [("label_101", 673_799_072), ("unconditional", 673_681_568)])
def test_xl_has_the_published_number_of_parameters(condition, count):
    with torch.device("meta"):
        model = MODELS.build({"type": "Latte-XL/2", "condition": condition})
    assert sum(p.numel() for p in model.parameters()) == count
    tables = (16 * 16 + 16) * 1152
    assert (count + tables) / 1e6 == pytest.approx(
        {"label_101": 674.11, "unconditional": 673.99}[condition], abs=0.0051
    )


def test_blocks_alternate_and_come_in_pairs():
    assert [block.attn.axis for block in toy().blocks] == ["space", "time", "space", "time"]
    with pytest.raises(ValueError, match=r"depth=3 is not a multiple of 2"):
        toy(depth=3)


def test_with_closed_temporal_gates_it_is_dit_frame_by_frame():
    latte, dit = toy(no_temporal_pos_emb=True), toy("DiT-XL/2", depth=2)
    close_gates(latte.blocks[1::2])
    state = {name: w for name, w in latte.state_dict().items() if not name.startswith("blocks.")}
    for i in range(2):
        block = latte.blocks[2 * i].state_dict()
        state |= {f"blocks.{i}.{name}": w for name, w in block.items()}
    dit.load_state_dict(state)
    x, t, y = inputs()
    frames = [dit(x[:, :, [f]], t, y) for f in range(3)]
    torch.testing.assert_close(latte(x, t, y), torch.cat(frames, dim=2), atol=1e-5, rtol=1e-5)


def test_with_closed_spatial_gates_positions_are_independent():
    model = toy()
    close_gates(model.blocks[::2])
    x, t, y = inputs()
    out = model(x, t, y)
    x[:, :, 0, :2, :2] += 1.0  # the first patch of the first frame
    changed = (model(x, t, y) - out).abs().amax(dim=(0, 1)) > 1e-6  # [T, H, W]
    assert changed[:, :2, :2].all()
    assert not changed[:, 2:].any()
    assert not changed[:, :, 2:].any()


@pytest.mark.parametrize("frames", [1, 3])
def test_temporal_positions_enter_right_before_the_first_temporal_block(frames):
    model = toy(depth=2)
    timeless = toy(depth=2, no_temporal_pos_emb=True)
    close_gates([model.blocks[1], timeless.blocks[1]])
    x, t, y = inputs(size=(frames, 6, 8))
    seen = []
    timeless.final_layer.register_forward_pre_hook(lambda _, args: seen.append(args))
    timeless(x, t, y)  # its last tokens have not met a position in time
    tokens, *rest = seen[0]
    expected = model.final_layer(tokens + sincos_1d(48, torch.arange(frames))[:, None], *rest)
    torch.testing.assert_close(model(x, t, y), model.unpatchify(expected, x.shape[2:]), atol=1e-5, rtol=1e-5)


def test_an_unconditional_model_ignores_y():
    model = toy(condition="unconditional")
    x, t, y = inputs()
    assert not any(name.startswith("y_embedder") for name in model.state_dict())
    assert torch.equal(model(x, t, y), model(x, t, torch.randn(2, 1, 5, 16)))
    assert torch.equal(model.null_condition(2), torch.zeros(2, 1, 1, 1))


class TestWeights:
    @pytest.mark.parametrize("condition", ["label_10", "unconditional"])
    def test_the_official_training_checkpoint_loads(self, condition, tmp_path):
        a, b = toy(seed=1, condition=condition), toy(seed=2, condition=condition)
        ema = official(a, temp_embed=torch.zeros(1, 16, 48))
        table = load(b, {"model": official(toy(seed=3)), "ema": ema}, tmp_path)
        torch.testing.assert_close(a.state_dict(), b.state_dict())
        assert "Latte, official" in table
        assert "2 dropped (recomputed for every size)" in table

    def test_our_own_and_open_soras_files_load(self, tmp_path):
        a, b = toy(seed=1), toy(seed=2)
        table = load(b, {**a.state_dict(), "pos_embed_temporal": torch.zeros(1, 16, 48)}, tmp_path)
        torch.testing.assert_close(a.state_dict(), b.state_dict())
        assert "(Latte)" in table

    @pytest.mark.parametrize("condition", ["label_10", "label_101", "text"])
    def test_dits_blocks_go_by_index_and_its_classes_are_dropped(self, condition, tmp_path):
        dit, latte = toy("DiT-XL/2", seed=1), toy(seed=2, condition=condition)
        before = {name: w.clone() for name, w in latte.state_dict().items()}
        table = load(latte, official(dit), tmp_path)
        assert "DiT, official; every second block becomes temporal" in table
        assert "1 dropped (the classes are those of DiT's images)" in table
        assert "left as is" in table
        for name, after in latte.state_dict().items():
            assert torch.equal(after, before[name] if name.startswith("y_embedder.") else dit.state_dict()[name])

    def test_an_unconditional_model_starts_from_dit(self, tmp_path):
        latte = toy(seed=2, condition="unconditional")
        table = load(latte, official(toy("DiT-XL/2", seed=1)), tmp_path)
        assert "1 dropped (the classes are those of DiT's images)" in table
        assert "left as is" not in table

    def test_patches_of_two_frames_start_from_one(self, tmp_path):
        image, video = toy(seed=1), toy("Latte-XL/2x2", seed=2)
        load(video, official(image, temp_embed=torch.zeros(1, 16, 48)), tmp_path)
        x, t, y = inputs(size=(1, 6, 8))
        still = video(x.expand(-1, -1, 2, -1, -1), t, y)
        torch.testing.assert_close(still, image(x, t, y).expand(-1, -1, 2, -1, -1), atol=1e-5, rtol=1e-5)

    def test_a_text_models_file_is_refused_by_a_class_model(self, tmp_path):
        with pytest.raises(UserError, match="condition='text'"):
            load(toy(), toy(condition="text").state_dict(), tmp_path)

    @pytest.mark.parametrize("form", ["checkpoint", "file"])
    @pytest.mark.parametrize("condition", ["label_10", "text"])
    def test_our_own_dit_is_told_from_our_own_latte(self, form, condition, tmp_path, caplog):
        dit, latte = toy("DiT-XL/2", seed=1, condition=condition), toy(seed=2, condition=condition)
        into_latte = written(dit, "DiT-XL/2", form, tmp_path / "dit")
        with caplog.at_level("INFO"):
            made = toy(condition=condition, from_pretrained=into_latte)
        assert "(DiT; every second block becomes temporal)" in caplog.text
        assert torch.equal(made.blocks[1].attn.qkv.weight, dit.blocks[1].attn.qkv.weight)
        assert (CLASSES in made.state_dict()) == ("the classes are those of DiT's images" in caplog.text)
        caplog.clear()
        with caplog.at_level("INFO"):
            again = toy(condition=condition, from_pretrained=written(latte, "Latte-XL/2", form, tmp_path / "latte"))
        assert "(Latte)" in caplog.text
        torch.testing.assert_close(again.state_dict(), latte.state_dict(), atol=0, rtol=0)

    @pytest.mark.parametrize("form", ["checkpoint", "file"])
    def test_our_own_latte_is_refused_by_dit(self, form, tmp_path):
        path = written(toy(), "Latte-XL/2", form, tmp_path / "latte")
        with pytest.raises(UserError, match="weights of Latte, not of DiT"):
            toy("DiT-XL/2", from_pretrained=path)

    @pytest.mark.parametrize("said", ["os.path", "SomeoneElses-XL", "STDiT-XL/2"])
    def test_a_header_that_says_something_else_says_nothing(self, said, tmp_path):
        path = written(toy(seed=1), said, "file", tmp_path / "w")
        for name in ("Latte-XL/2", "DiT-XL/2"):
            torch.testing.assert_close(toy(name, from_pretrained=path).state_dict(), toy(seed=1).state_dict())

    def test_another_depth_is_refused(self, tmp_path):
        with pytest.raises(UserError, match=r"does not fit this Latte"):
            load(toy(depth=2), toy().state_dict(), tmp_path)


def test_every_size_is_registered():
    names = {f"Latte-{size}/{p}" for size in ("XL", "L", "B", "S") for p in (2, 4, 8)} | {"Latte-XL/2x2", "Latte"}
    assert names <= set(MODELS.choices())
    assert isinstance(toy("Latte-S/8", depth=2), Latte)
