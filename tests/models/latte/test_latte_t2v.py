"""LatteT2V: sizes, names, initialisation, modes, weights, and equality with diffusers' model."""

import pytest
import torch
from diffusers import LatteTransformer3DModel, PixArtTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor

from opensora.models.latte.latte import LatteT2V, convert
from opensora.models.layers.positions import sincos_2d
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import C_TEXT, TOY, L, awake, inputs

TEMPORAL = "temporal_blocks."


def toy(**changes) -> LatteT2V:
    torch.manual_seed(0)
    return awake(LatteT2V(**{**TOY, "base_size": 4, **changes}))


def reference(model: LatteT2V, num_frames: int = 16) -> LatteTransformer3DModel:
    config, state = model.to_diffusers(num_frames=num_frames)
    theirs = LatteTransformer3DModel.from_config(config)
    theirs.load_state_dict(state)
    return theirs.eval()


def run_reference(theirs: LatteTransformer3DModel, cond: dict[str, Tensor], **kwargs) -> Tensor:
    """Their model's own 2-D mask is not usable for videos: attention wants the bias of each frame."""
    bias = (1 - cond["mask"].float()[:, None]) * -10000.0  # [B, 1, L]
    bias = bias.repeat_interleave(cond["x"].shape[2], dim=0)  # [B T, 1, L]
    out = theirs(cond["x"], cond["timestep"], cond["y"][:, 0], encoder_attention_mask=bias, **kwargs)
    return out.sample


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Two orders of fp32 sums: 1e-4 of the largest number is far above both, and far below any error of formula."""
    assert float(theirs.abs().max()) > 0.1
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def blocks_of(*parts: str) -> list[str]:
    return ["scale_shift_table", *(f"{part}.{kind}" for part in parts for kind in ("weight", "bias"))]


def test_xl_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = MODELS.build({"type": "LatteT2V-XL/2"})
        theirs = LatteTransformer3DModel.from_config(model.to_diffusers()[0])
    assert sum(p.numel() for p in model.parameters()) == 1_057_246_880
    assert sum(p.numel() for p in theirs.parameters()) == 1_057_246_880
    assert theirs.config.sample_size == 64


def test_state_dict_names_are_pixarts_and_those_of_temporal_blocks():
    common = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    text = ("cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj")
    names = {f"blocks.{i}.{name}" for i in range(2) for name in blocks_of(*common, *text)}
    names |= {f"temporal_blocks.{i}.{name}" for i in range(2) for name in blocks_of(*common)}
    names |= {"y_embedder.y_embedding", "final_layer.scale_shift_table"}
    for layer in ("x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "t_block.1", "final_layer.linear"):
        names |= {f"{layer}.weight", f"{layer}.bias"}
    for layer in ("y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2"):
        names |= {f"{layer}.weight", f"{layer}.bias"}
    assert toy().state_dict().keys() == names


def test_blocks_come_in_forward_order():
    model = toy()
    called = []
    for name, block in model.named_modules():
        if name.count(".") == 1 and "blocks." in name:
            block.register_forward_hook(lambda block, *_: called.append(block))
    model(**inputs(model))
    assert called == model.transformer_blocks()
    assert called == [model.blocks[0], model.temporal_blocks[0], model.blocks[1], model.temporal_blocks[1]]


def test_at_first_the_output_is_zero_and_temporal_blocks_are_the_identity():
    model = LatteT2V(**TOY)
    assert model(**inputs(model)).abs().max() == 0
    x = torch.randn(2, 3, 4, 48)
    for block in model.temporal_blocks:
        torch.testing.assert_close(block(x, None, torch.randn(2, 6, 48)), x, atol=0, rtol=0)


class TestDiffusers:
    @pytest.mark.parametrize("size", [(1, 8, 8), (5, 8, 8), (3, 6, 12), (2, 4, 4)])
    def test_equal_outputs_in_every_shape(self, size):
        """Sizes: that of their stored table, a wide one and a small one, for which it is computed anew."""
        model = toy()
        cond = inputs(model, size=size)
        with torch.no_grad():
            assert_same(model(**cond), run_reference(reference(model, num_frames=size[0]), cond))

    @pytest.mark.parametrize(
        ("scales", "sample_size", "their_scale"),
        [
            ({"base_size": None}, 64, 1),
            ({"base_size": None, "space_scale": 0.5}, 64, 1),
            ({"base_size": 64, "space_scale": 2.0}, 128, 2),
            ({"base_size": 4, "space_scale": 0.5}, 16, 1),
        ],
    )
    def test_equal_outputs_with_every_range_of_positions(self, scales, sample_size, their_scale):
        """They derive their scale from their sample size, 64 latent pixels being 1."""
        model = toy(**scales)
        theirs = reference(model, num_frames=2)
        cond = inputs(model, size=(2, 6, 8))
        with torch.no_grad():
            assert_same(model(**cond), run_reference(theirs, cond))
        assert (theirs.config.sample_size, theirs.pos_embed.interpolation_scale) == (sample_size, their_scale)

    @pytest.mark.parametrize("num_frames", [1, 3])
    def test_images_are_made_by_the_video_model_without_temporal_attention(self, num_frames):
        images, video = toy(mode="images"), toy()
        video.load_state_dict(images.state_dict())
        cond = inputs(images, size=(num_frames, 6, 8))
        with torch.no_grad():
            theirs = run_reference(reference(video), cond, enable_temporal_attentions=False)
            assert_same(images(**cond), theirs)

    def test_their_weights_load_from_their_folder(self, tmp_path):
        torch.manual_seed(2)
        theirs = reference(toy(), num_frames=3)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_(std=0.1)
        theirs.save_pretrained(tmp_path / "transformer")
        model = LatteT2V(**TOY, base_size=4, from_pretrained=str(tmp_path / "transformer")).eval()
        cond = inputs(model)
        with torch.no_grad():
            assert_same(model(**cond), run_reference(theirs, cond))

    def test_there_and_back_is_exact_and_reported(self):
        model, other = toy(), toy()
        theirs = model.to_diffusers()[1]
        result = convert({**theirs, "pos_embed.pos_embed": torch.zeros(1, 16, 48)}, other)
        assert result.format == "LatteT2V, diffusers"
        assert result.dropped == {"pos_embed.pos_embed": "recomputed for every size"}
        assert list(result.initial) == ["y_embedder.y_embedding"]
        own = model.state_dict()
        assert result.tensors.keys() == own.keys() - {"y_embedder.y_embedding"}
        assert all(torch.equal(value, own[name]) for name, value in result.tensors.items())

    def test_an_older_files_table_of_no_text_is_kept(self):
        table = torch.randn(L + 2, C_TEXT)
        result = convert({**toy().to_diffusers()[1], "caption_projection.y_embedding": table}, toy())
        torch.testing.assert_close(result.tensors["y_embedder.y_embedding"], table[:L])
        assert "y_embedder.y_embedding" in result.converted

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"patch_size": (1, 2, 4)}, "square patches, not 2 x 4"),
            ({"patch_size": (2, 2, 2)}, "patches of one frame, not 2"),
            ({"base_size": 33, "space_scale": 2.0}, "base_size / space_scale = 16.5"),
            ({"base_size": 64}, "base_size / space_scale = 64"),
            ({"time_scale": 2.0, "no_temporal_pos_emb": True}, "time_scale=1, not 2.0; temporal positions"),
            ({"mlp_ratio": 2.0}, "mlp_ratio=4"),
            ({"mode": "images"}, "mode='video', as it runs the temporal blocks; .* enable_temporal_attentions=False"),
        ],
    )
    def test_what_diffusers_cannot_express_is_refused(self, changes, problem):
        with pytest.raises(UserError, match=problem):
            toy(**changes).to_diffusers()


class TestModes:
    def test_images_ignore_each_other_and_videos_do_not(self):
        video, images = toy(), toy(mode="images")
        cond = inputs(video)
        alone = {**cond, "x": cond["x"][:, :, 1:2]}
        torch.testing.assert_close(images(**cond)[:, :, 1:2], images(**alone), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(video(**cond)[:, :, 1:2], video(**alone), atol=1e-3)

    def test_images_freeze_the_temporal_blocks_and_share_checkpoints(self):
        video, images = toy(), toy(mode="images").train()
        images.load_state_dict(video.state_dict())
        assert images.transformer_blocks() == list(images.blocks)
        images(**inputs(images)).square().mean().backward()
        without_gradient = {name for name, p in images.named_parameters() if p.grad is None}
        assert without_gradient == {name for name in images.state_dict() if name.startswith(TEMPORAL)}
        assert images.flops((3, 6, 8), L) < 0.7 * video.flops((3, 6, 8), L)

    def test_frames_are_a_set_without_temporal_positions(self):
        model = toy(no_temporal_pos_emb=True)
        cond = inputs(model)
        flipped = model(**{**cond, "x": cond["x"].flip(2)})
        torch.testing.assert_close(model(**cond).flip(2), flipped, atol=1e-5, rtol=1e-5)

    def tokens(self, model: LatteT2V, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """What enters the first block minus the patches' embedding: spatial positions; after it, those of time."""
        seen = {}
        model.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(space=args[0]))
        model.blocks[0].register_forward_hook(lambda *args: seen.update(out=args[2]))
        model.temporal_blocks[0].register_forward_pre_hook(lambda _, args: seen.update(time=args[0]))
        cond = {**inputs(model, size=size), "x": torch.zeros(2, 4, *size)}
        with torch.no_grad():
            model(**cond)
        return seen["space"][0, 0] - model.x_embedder.proj.bias, (seen["time"] - seen["out"])[0, :, 0]

    def test_time_scale_half_sees_the_span_of_twice_as_many_frames(self):
        whole, half = self.tokens(toy(), (5, 2, 2))[1], self.tokens(toy(time_scale=0.5), (3, 2, 2))[1]
        torch.testing.assert_close(half, whole[::2], atol=1e-5, rtol=0)

    def test_rows_and_columns_span_the_same_positions_at_every_resolution(self):
        rows = torch.arange(4) * 8.0  # 4 rows over a range of 32
        expected = sincos_2d(48, rows, torch.arange(2) * 16.0)
        for either in (toy(base_size=None), toy(base_size=None, space_scale=0.5)):
            torch.testing.assert_close(self.tokens(either, (1, 8, 4))[0], expected, atol=1e-6, rtol=0)
        narrow = self.tokens(toy(base_size=16), (1, 8, 4))[0]
        torch.testing.assert_close(narrow, sincos_2d(48, rows / 2, torch.arange(2) * 8.0), atol=1e-6, rtol=0)

    @pytest.mark.parametrize(("freeze", "trained"), [("not_temporal", TEMPORAL), ("text", "blocks.0.attn.")])
    def test_freeze(self, freeze, trained):
        names = [name for name, p in toy(freeze=freeze).named_parameters() if p.requires_grad]
        assert any(name.startswith(trained) for name in names)
        assert all("cross_attn" not in name for name in names)

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"mode": "image"}, "mode='image' is not one of video, images"),
            ({"freeze": "all"}, "freeze='all' is not one of"),
            ({"mode": "images", "freeze": "not_temporal"}, "leaves out the temporal blocks"),
        ],
    )
    def test_mistakes(self, changes, problem):
        with pytest.raises(ValueError, match=problem):
            toy(**changes)


class TestPixArt:
    """A PixArt initialisation is PixArt at step 0, whose form is diffusers' own model."""

    def pixart(self) -> PixArtTransformer2DModel:
        torch.manual_seed(3)
        size = {"num_attention_heads": 2, "attention_head_dim": 24, "cross_attention_dim": 48, "num_layers": 2}
        model = PixArtTransformer2DModel(
            **size, sample_size=8, caption_channels=C_TEXT, use_additional_conditions=False
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        return model.eval()

    def outputs(self, pixart, cond) -> Tensor:
        """Frame by frame, [B, C, T, H, W]."""
        return torch.stack(
            [
                pixart(
                    frame,
                    cond["y"][:, 0],
                    cond["timestep"],
                    added_cond_kwargs={"resolution": None, "aspect_ratio": None},
                    encoder_attention_mask=cond["mask"].long(),
                ).sample
                for frame in cond["x"].unbind(2)
            ],
            dim=2,
        )

    @pytest.mark.parametrize("changes", [{"T": 1}, {"T": 3, "no_temporal_pos_emb": True}, {"T": 3, "mode": "images"}])
    def test_the_video_model_starts_as_the_image_model(self, tmp_path, changes):
        pixart = self.pixart()
        changes = dict(changes)
        T = changes.pop("T")
        save_file(pixart.state_dict(), tmp_path / "w.safetensors")
        model = LatteT2V(**TOY, base_size=4, **changes, from_pretrained=str(tmp_path / "w.safetensors")).eval()
        cond = inputs(model, size=(T, 8, 8))
        with torch.no_grad():
            assert_same(model(**cond), self.outputs(pixart, cond))

    def test_a_released_pickle_loads_and_says_what_it_lacks(self, tmp_path):
        source = toy()
        state = {name: value for name, value in source.state_dict().items() if not name.startswith(TEMPORAL)}
        state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].squeeze(2)
        state["pos_embed"] = torch.zeros(1, 16, 48)
        state["csize_embedder.mlp.0.weight"] = torch.zeros(16, 256)
        torch.save({"state_dict": state}, tmp_path / "w.pth")
        result = convert(state, source)
        assert result.format == "PixArt-alpha"
        assert result.dropped.keys() == {"pos_embed", "csize_embedder.mlp.0.weight"}
        assert result.initial.keys() == {name for name in source.state_dict() if name.startswith(TEMPORAL)}
        model = LatteT2V(**TOY, from_pretrained=str(tmp_path / "w.pth"))
        for name, value in model.state_dict().items():
            if not name.startswith(TEMPORAL):
                assert torch.equal(value, source.state_dict()[name])
        assert not any(block.attn.proj.weight.any() or block.mlp.fc2.weight.any() for block in model.temporal_blocks)

    def test_half_a_temporal_part_is_refused(self, tmp_path):
        state = toy().state_dict()
        del state["temporal_blocks.1.attn.proj.weight"]
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"missing in the file"):
            toy(from_pretrained=str(tmp_path / "w.pth"))


def test_our_own_checkpoint_returns_exactly(tmp_path):
    model = toy()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    other = toy(from_pretrained=str(tmp_path / "w.safetensors"))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), atol=0, rtol=0)
