"""DiT: sizes, names, equality with the paper's formulas and with diffusers, and every way in which its weights come."""

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel
from einops import rearrange

from opensora.models.dit.dit import DiT, convert
from opensora.models.latte.latte import Latte
from opensora.models.layers.embedders import timestep_sinusoid
from opensora.models.layers.positions import sincos_1d, sincos_2d
from opensora.models.loading import load_weights
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import awake

TOY = {"depth": 2, "hidden_size": 48, "num_heads": 2, "caption_channels": 16}
CLASSES = "y_embedder.embedding_table.weight"


def toy(name="DiT-XL/2", seed=0, **changes) -> DiT:
    torch.manual_seed(seed)
    return awake(MODELS.build({"type": name, "condition": "label_10", **TOY, **changes}))


def official(model: DiT) -> dict[str, torch.Tensor]:
    """The model's weights as Peebles & Xie store them: 2-D patch kernels, and the position table."""
    state = dict(model.state_dict())
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].squeeze(2)
    return {"pos_embed": torch.zeros(1, 16, model.hidden_size), **state}


def load(model: DiT, state, folder) -> str:
    """Write the state to a file and load it: the report."""
    torch.save(state, folder / "w.pt")
    return load_weights(model, folder / "w.pt", convert)


def inputs(size=(1, 8, 8), seed=1):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, *size, generator=rng), torch.tensor([3, 641]), torch.tensor([7, 10])[:, None, None, None]


# table 1 of the paper and the released code, which counts the position table of a 32 x 32 latent
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *[("DiT-XL/2", 675.13), ("DiT-XL/4", 675.07), ("DiT-XL/8", 675.68)],
        *[("DiT-L/2", 458.10), ("DiT-L/4", 458.05), ("DiT-L/8", 458.59)],
        *[("DiT-B/2", 130.51), ("DiT-B/4", 130.48), ("DiT-B/8", 130.88)],
        *[("DiT-S/2", 32.96), ("DiT-S/4", 32.95), ("DiT-S/8", 33.15)],
    ],
)
def test_sizes_are_the_published_ones(name, millions):
    with torch.device("meta"):
        model = MODELS.build({"type": name, "condition": "label_1000"})
    positions = (32 // model.patch_size[1]) ** 2 * model.hidden_size
    assert (sum(p.numel() for p in model.parameters()) + positions) / 1e6 == pytest.approx(millions, abs=0.0051)


def test_xl_has_exactly_the_published_number_of_parameters():
    with torch.device("meta"):
        model = MODELS.build({"type": "DiT-XL/2", "condition": "label_1000"})
    assert sum(p.numel() for p in model.parameters()) == 674_834_720


def test_state_dict_names_are_those_of_released_checkpoints():
    in_block = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"]
    layers = ["x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2"]
    layers += ["final_layer.linear", "final_layer.adaLN_modulation.1"]
    layers += [f"blocks.{i}.{name}" for i in range(2) for name in in_block]
    expected = {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}
    assert toy().state_dict().keys() == expected | {CLASSES}
    text = {f"y_embedder.y_proj.fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    assert toy(condition="text").state_dict().keys() == expected | text | {"y_embedder.y_embedding"}
    assert toy(condition="unconditional").state_dict().keys() == expected


def test_a_new_model_predicts_zero_and_its_blocks_are_the_identity():
    model = MODELS.build({"type": "DiT-XL/2", "condition": "label_10", **TOY})
    x, t, y = inputs()
    assert model(x, t, y).abs().max() == 0
    tokens = torch.randn(2, 1, 16, 48)
    assert torch.equal(model.blocks[0](tokens, torch.randn(2, 48)), tokens)
    assert float(model.y_embedder.embedding_table.weight.detach().std()) == pytest.approx(0.02, rel=0.15)


def by_the_paper(w, x, t, label, heads=2):
    """A video through DiT, written down from the paper, with patches of 1 x 2 x 2 and Open-Sora's temporal table."""
    B, T, H, W = len(x), x.shape[2], x.shape[3] // 2, x.shape[4] // 2

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    patches = rearrange(x, "B C T (H p) (W q) -> B (T H W) (C p q)", p=2, q=2)
    tokens = patches @ w["x_embedder.proj.weight"].flatten(1).T + w["x_embedder.proj.bias"]
    D = tokens.shape[2]
    space = sincos_2d(D, torch.arange(H), torch.arange(W)).repeat(T, 1)
    tokens = tokens + space + sincos_1d(D, torch.arange(T)).repeat_interleave(H * W, dim=0)
    c = linear(F.silu(linear(timestep_sinusoid(t, 256), "t_embedder.mlp.0")), "t_embedder.mlp.2")
    c = F.silu(c + w[CLASSES][label.flatten()])[:, None]

    for i in range(2):
        shift, scale, gate, shift2, scale2, gate2 = linear(c, f"blocks.{i}.adaLN_modulation.1").chunk(6, dim=2)
        h = linear(F.layer_norm(tokens, (D,), eps=1e-6) * (1 + scale) + shift, f"blocks.{i}.attn.qkv")
        q, k, v = h.reshape(B, -1, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
        h = (q @ k.mT / (D // heads) ** 0.5).softmax(dim=3) @ v
        tokens = tokens + gate * linear(h.transpose(1, 2).reshape(B, -1, D), f"blocks.{i}.attn.proj")
        h = linear(F.layer_norm(tokens, (D,), eps=1e-6) * (1 + scale2) + shift2, f"blocks.{i}.mlp.fc1")
        tokens = tokens + gate2 * linear(F.gelu(h, approximate="tanh"), f"blocks.{i}.mlp.fc2")

    shift, scale = linear(c, "final_layer.adaLN_modulation.1").chunk(2, dim=2)
    out = linear(F.layer_norm(tokens, (D,), eps=1e-6) * (1 + scale) + shift, "final_layer.linear")
    return rearrange(out, "B (T H W) (p q C) -> B C T (H p) (W q)", T=T, H=H, p=2, q=2)


def test_a_video_goes_through_the_papers_formulas():
    model = toy()
    x, t, y = inputs(size=(3, 6, 8))
    torch.testing.assert_close(model(x, t, y), by_the_paper(model.state_dict(), x, t, y), atol=1e-5, rtol=1e-5)


def test_temporal_positions_are_for_several_frames_only():
    timed, timeless = toy(), toy(no_temporal_pos_emb=True)
    x, t, y = inputs(size=(1, 4, 4))
    assert torch.equal(timed(x, t, y), timeless(x, t, y))
    x, t, y = inputs(size=(3, 4, 4))
    assert not torch.allclose(timed(x, t, y), timeless(x, t, y), atol=1e-4)
    torch.testing.assert_close(timeless(x.flip(2), t, y).flip(2), timeless(x, t, y), atol=1e-5, rtol=1e-5)


def test_without_learn_sigma_the_output_has_the_latents_channels():
    x, t, y = inputs()
    assert toy(learn_sigma=False)(x, t, y).shape == x.shape


def test_the_null_condition_is_the_row_after_the_classes():
    assert toy().null_condition(2).flatten().tolist() == [10, 10]
    assert toy(condition="text").null_condition(2).shape == (2, 1, 1, 16)
    with pytest.raises(ValueError, match="cfg_scale=1"):
        toy(class_dropout_prob=0.0).null_condition(1)


def test_a_condition_of_the_wrong_kind_is_refused():
    x, t, y = inputs()
    with pytest.raises(ValueError, match="text encoder 'clip'"):
        toy(condition="text")(x, t, torch.randn(2, 1, 7, 16))
    with pytest.raises(ValueError, match="text encoder 'clip'"):
        toy(condition="text")(x, t, y)
    with pytest.raises(ValueError, match="text encoder 'classes'"):
        toy()(x, t, torch.randn(2, 1, 1, 16))
    for condition in ("label_", "label_0", "label_x", "classes"):
        with pytest.raises(ValueError, match="label_N"):
            toy(condition=condition)


class TestDiffusers:
    """Weights to and from `DiTTransformer2DModel`, and equal outputs."""

    CONFIGS = (
        {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2, "sample_size": 8, "patch_size": 2},
        {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 3, "sample_size": 16, "patch_size": 4},
        {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 1, "sample_size": 24, "patch_size": 8},
    )

    @staticmethod
    def theirs(config) -> DiTTransformer2DModel:
        """Their model with random weights, of which those that must agree agree, and DiT's timestep frequencies."""
        torch.manual_seed(3)
        model = DiTTransformer2DModel(**{"num_embeds_ada_norm": 10, "norm_eps": 1e-6, "out_channels": 8, **config})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3 if parameter.ndim == 1 else parameter[0].numel() ** -0.5)
        first = model.transformer_blocks[0].norm1.emb
        for block in model.transformer_blocks:
            block.norm1.emb.load_state_dict(first.state_dict())
            block.norm1.emb.time_proj.downscale_freq_shift = 0  # theirs is 1, which is not DiT's
        return model.eval()

    @staticmethod
    def ours(config, seed) -> DiT:
        return toy(
            seed=seed,
            hidden_size=config["num_attention_heads"] * config["attention_head_dim"],
            num_heads=config["num_attention_heads"],
            depth=config["num_layers"],
            patch_size=(1, config["patch_size"], config["patch_size"]),
            learn_sigma=config.get("out_channels", 8) == 8,
        )

    @staticmethod
    def assert_equal_outputs(ours, theirs, size, timesteps=(3, 641)):
        x, _, y = inputs(size=(1, size, size))
        t = torch.tensor(timesteps)
        with torch.no_grad():
            expected = theirs(x[:, :, 0], t, class_labels=y.flatten()).sample
            difference = (ours(x, t, y)[:, :, 0] - expected).abs().max()
        assert difference < 1e-5 * expected.abs().max()  # fp32 rounding of a few layers

    @pytest.mark.parametrize("config", [*CONFIGS, {**CONFIGS[0], "out_channels": 4}])
    def test_theirs_gives_the_same_in_our_model(self, config, tmp_path):
        theirs, ours = self.theirs(config), self.ours(config, seed=1)
        assert "DiT, diffusers" in load(ours, theirs.state_dict(), tmp_path)
        self.assert_equal_outputs(ours, theirs, config["sample_size"])

    @pytest.mark.parametrize("config", CONFIGS)
    def test_ours_gives_the_same_in_their_model(self, config):
        ours = self.ours(config, seed=2)
        made, state = ours.to_diffusers(sample_size=config["sample_size"])
        theirs = self.theirs(made)
        theirs.load_state_dict(state)
        assert {name: theirs.config[name] for name in config} == config
        self.assert_equal_outputs(ours, theirs, config["sample_size"])

    def test_their_own_timestep_frequencies_agree_at_timestep_0_only(self):
        ours = self.ours(self.CONFIGS[0], seed=2)
        made, state = ours.to_diffusers(sample_size=8)
        theirs = DiTTransformer2DModel(**made).eval()
        theirs.load_state_dict(state)
        self.assert_equal_outputs(ours, theirs, 8, timesteps=(0, 0))
        with pytest.raises(AssertionError):
            self.assert_equal_outputs(ours, theirs, 8)

    def test_a_round_trip_is_exact_and_can_be_saved(self, tmp_path):
        ours, again = self.ours(self.CONFIGS[0], seed=2), self.ours(self.CONFIGS[0], seed=3)
        made, state = ours.to_diffusers()
        theirs = DiTTransformer2DModel(**made)
        theirs.load_state_dict(state)
        theirs.save_pretrained(tmp_path)
        load_weights(again, tmp_path / "diffusion_pytorch_model.safetensors", convert)
        torch.testing.assert_close(again.state_dict(), ours.state_dict(), atol=0, rtol=0)
        addresses = [tensor.data_ptr() for tensor in state.values()]
        names = [name for name in state if "norm1.emb" in name]
        assert len({state[name].data_ptr() for name in names}) == len(names) < len(addresses)

    def test_a_sample_size_that_is_no_multiple_of_the_patch_is_refused(self):
        with pytest.raises(UserError, match="sample_size=9 must be a multiple of the patch, 2"):
            self.ours(self.CONFIGS[0], seed=2).to_diffusers(sample_size=9)

    def test_copies_that_differ_or_are_missing_are_refused(self, tmp_path):
        name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"
        state = self.theirs(self.CONFIGS[0]).state_dict()
        state[name] = state[name] + 1
        with pytest.raises(UserError, match=r"should be copies.*differ"):
            load(toy(), state, tmp_path)
        del state[name]
        with pytest.raises(UserError, match=name):
            load(toy(), state, tmp_path)

    def test_another_depth_is_refused_in_our_names(self, tmp_path):
        with pytest.raises(UserError, match=r"(?s)in the file only.*blocks\.1\."):
            load(toy(depth=1), self.theirs(self.CONFIGS[0]).state_dict(), tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"condition": "text"}, "classes, not condition='text'"),
            ({"condition": "unconditional"}, "condition='unconditional'"),
            ({"class_dropout_prob": 0.0}, "class_dropout_prob=0"),
            ({"patch_size": (2, 2, 2)}, "patches of one frame, not 2"),
            ({"patch_size": (1, 2, 4)}, "square patches, not 2 x 4"),
            ({"mlp_ratio": 2.0}, "mlp_ratio"),
            ({"name": "Latte-XL/2"}, "attention among all tokens"),
        ],
    )
    def test_what_the_format_cannot_hold_is_refused(self, changes, message):
        with pytest.raises(UserError, match=message):
            toy(**changes).to_diffusers()


class TestWeights:
    def test_the_official_file_loads(self, tmp_path):
        a, b = toy(seed=1), toy(seed=2)
        table = load(b, official(a), tmp_path)
        torch.testing.assert_close(a.state_dict(), b.state_dict())
        assert "DiT, official" in table
        assert "2-D patch kernel made 3-D" in table
        assert "1 dropped (recomputed for every size)" in table

    def test_a_training_checkpoint_gives_its_average(self, tmp_path):
        a, b = toy(seed=1), toy(seed=2)
        torch.save({"model": official(b), "ema": official(a)}, tmp_path / "w.pt")
        c = toy(from_pretrained=str(tmp_path / "w.pt"))
        torch.testing.assert_close(a.state_dict(), c.state_dict())

    def test_open_soras_file_loads(self, tmp_path):
        a, b = toy(seed=1, condition="text"), toy(seed=2, condition="text")
        tables = {"pos_embed_spatial": torch.zeros(1, 16, 48), "pos_embed_temporal": torch.zeros(1, 4, 48)}
        table = load(b, {**a.state_dict(), **tables}, tmp_path)
        torch.testing.assert_close(a.state_dict(), b.state_dict())
        assert "2 dropped (recomputed for every size)" in table
        assert "converted" not in table

    @pytest.mark.parametrize("form", [official, DiT.state_dict])
    def test_patches_of_two_frames_start_as_the_image(self, form, tmp_path):
        image, video = toy(seed=1), toy("DiT-XL/2x2", seed=2)
        assert "patch kernel of one frame spread over 2" in load(video, form(image), tmp_path)
        x, t, y = inputs()
        still = video(x.expand(-1, -1, 2, -1, -1), t, y)
        torch.testing.assert_close(still, image(x, t, y).expand(-1, -1, 2, -1, -1), atol=1e-5, rtol=1e-5)

    def test_from_pretrained_of_an_image_model_works_with_patches_of_two_frames(self, tmp_path):
        torch.save(official(toy()), tmp_path / "w.pt")
        x, t, _ = inputs(size=(4, 8, 8))
        model = toy("DiT-XL/2x2", condition="text", from_pretrained=str(tmp_path / "w.pt"))
        assert model(x, t, model.null_condition(2)).isfinite().all()

    def test_a_text_model_keeps_its_own_caption_embedder(self, tmp_path):
        classes, text = toy(seed=1), toy(seed=2, condition="text")
        before = {name: w.clone() for name, w in text.state_dict().items()}
        table = load(text, official(classes), tmp_path)
        why = "the file has classes, the model takes text"
        assert f"1 dropped ({why})" in table
        assert f"5 left as is ({why})" in table
        for name, after in text.state_dict().items():
            same = before[name] if name.startswith("y_embedder.") else classes.state_dict()[name]
            assert torch.equal(after, same)

    def test_a_class_model_refuses_a_text_models_file(self, tmp_path):
        model = toy(seed=2)
        before = {name: w.clone() for name, w in model.state_dict().items()}
        with pytest.raises(UserError, match=r"text model.*condition='text'"):
            load(model, toy(condition="text").state_dict(), tmp_path)
        torch.testing.assert_close(model.state_dict(), before)

    @pytest.mark.parametrize("num_classes", [3, 9, 200])
    def test_another_number_of_classes_is_learned_anew(self, num_classes, tmp_path):
        file, model = toy(seed=1), toy(seed=2, condition=f"label_{num_classes}")
        before = model.state_dict()[CLASSES].clone()
        table = load(model, official(file), tmp_path)
        assert torch.equal(model.state_dict()[CLASSES], before)
        assert table.count(f"the file's table has 11 rows, the model's {num_classes + 1}: other classes") == 2
        assert torch.equal(model.blocks[0].attn.qkv.weight, file.blocks[0].attn.qkv.weight)

    def test_without_dropout_the_row_of_no_class_is_left_out(self, tmp_path):
        file, model = toy(seed=1), toy(seed=2, class_dropout_prob=0.0)
        assert "the last row, 'no class', left out" in load(model, official(file), tmp_path)
        assert torch.equal(model.state_dict()[CLASSES], file.state_dict()[CLASSES][:10])

    def test_an_unconditional_model_drops_what_it_does_not_take(self, tmp_path):
        model = toy(seed=2, condition="unconditional")
        assert "the model is unconditional" in load(model, official(toy(seed=1)), tmp_path)
        assert "5 dropped (the model is unconditional)" in load(model, toy(condition="text").state_dict(), tmp_path)

    def test_a_model_with_a_condition_refuses_a_file_without(self, tmp_path):
        with pytest.raises(UserError, match=r"(?s)missing in the file.*y_embedder"):
            load(toy(), toy(condition="unconditional").state_dict(), tmp_path)

    def test_lattes_file_is_refused_by_name(self, tmp_path):
        assert issubclass(Latte, DiT)
        with pytest.raises(UserError, match="Latte"):
            load(toy(), {**official(toy()), "temp_embed": torch.zeros(1, 16, 48)}, tmp_path)
