"""STDiT: sizes, names, initialisation, invariances, gradients, FLOPs."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.checkpoint.load import save_checkpoint
from opensora.models.loading import load_weights
from opensora.models.stdit.stdit import STDiT
from opensora.models.stdit.stdit import convert as convert_stdit
from opensora.registry import MODELS
from opensora.utils.errors import UserError

L, C_TEXT = 7, 16
TOY = {"type": "STDiT-XXS/2", "caption_channels": C_TEXT, "model_max_length": L}


def toy(**changes) -> STDiT:
    torch.manual_seed(0)
    return awake(MODELS.build({**TOY, **changes}))


def awake(model: STDiT) -> STDiT:
    """Replace the zero initialisations, behind which every path would look right."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model.eval()


def inputs(batch=2, size=(3, 6, 8), seed=1):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, *size, generator=rng)
    t = torch.tensor([3, 641])[:batch]
    y = torch.randn(batch, 1, L, C_TEXT, generator=rng)
    mask = torch.arange(L)[None] < torch.tensor([[4], [L]])[:batch]
    return x, t, y, mask


def test_xl_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = MODELS.build({"type": "STDiT-XL/2"})
    assert sum(p.numel() for p in model.parameters()) == 759_620_768


def test_state_dict_names_are_those_of_released_checkpoints():
    block = ["scale_shift_table"]
    for layer in ("attn.qkv", "attn.proj", "attn_temp.qkv", "attn_temp.proj", "mlp.fc1", "mlp.fc2"):
        block += [f"{layer}.weight", f"{layer}.bias"]
    for layer in ("cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj"):
        block += [f"{layer}.weight", f"{layer}.bias"]
    rest = ["y_embedder.y_embedding", "final_layer.scale_shift_table"]
    for layer in (
        "x_embedder.proj",
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "t_block.1",
        "y_embedder.y_proj.fc1",
        "y_embedder.y_proj.fc2",
        "final_layer.linear",
    ):
        rest += [f"{layer}.weight", f"{layer}.bias"]
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in block} | set(rest)
    assert toy().state_dict().keys() == expected


def test_initialisation_makes_the_temporal_branch_and_the_output_zero():
    model = MODELS.build(TOY)
    x, t, y, mask = inputs()
    assert model(x, t, y, mask=mask).abs().max() == 0
    for block in model.blocks:
        assert not block.attn_temp.proj.weight.any()
        assert not block.cross_attn.proj.weight.any()
    assert float(model.blocks[0].scale_shift_table.detach().std()) == pytest.approx(48**-0.5, rel=0.15)
    assert float(model.t_block[1].weight.detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("size", [(1, 4, 4), (3, 6, 8), (2, 5, 7), (5, 3, 1)])
def test_any_size_gives_the_same_size_back(size):
    x, t, y, mask = inputs(size=size)
    out = toy()(x, t, y, mask=mask)
    assert out.shape == (2, 8, *size)
    assert out.dtype == torch.float32


def test_without_pred_sigma_the_output_has_the_latents_channels():
    x, t, y, mask = inputs()
    assert toy(pred_sigma=False)(x, t, y, mask=mask).shape == x.shape


def test_a_batch_of_two_equals_two_batches_of_one():
    model = toy()
    x, t, y, mask = inputs()
    both = model(x, t, y, mask=mask)
    for b in range(2):
        alone = model(x[b : b + 1], t[b : b + 1], y[b : b + 1], mask=mask[b : b + 1])
        torch.testing.assert_close(both[b : b + 1], alone, atol=1e-5, rtol=1e-5)


def test_a_padded_text_token_changes_nothing():
    model = toy()
    x, t, y, mask = inputs()
    other = y.clone()
    other[0, 0, 4:] = 1000.0
    torch.testing.assert_close(model(x, t, other, mask=mask), model(x, t, y, mask=mask))
    cut = model(x[:1], t[:1], y[:1, :, :4], mask=mask[:1, :4])
    torch.testing.assert_close(cut, model(x[:1], t[:1], y[:1], mask=mask[:1]), atol=1e-5, rtol=1e-5)


def test_a_caption_without_any_token_is_finite():
    x, t, y, mask = inputs()
    mask[0] = False
    assert toy()(x, t, y, mask=mask).isfinite().all()


def test_text_time_and_frame_order_matter():
    model = toy()
    x, t, y, mask = inputs()
    out = model(x, t, y, mask=mask)
    assert not torch.allclose(out, model(x, t, y.roll(1, dims=0), mask=mask))
    assert not torch.allclose(out, model(x, t.roll(1), y, mask=mask))
    assert not torch.allclose(out.flip(2), model(x.flip(2), t, y, mask=mask), atol=1e-4)
    timeless = toy(no_temporal_pos_emb=True)
    flipped = timeless(x.flip(2), t, y, mask=mask)
    torch.testing.assert_close(timeless(x, t, y, mask=mask).flip(2), flipped, atol=1e-5, rtol=1e-5)


def test_the_blocks_are_what_their_weights_say():
    """The formula, from the state dict: temporal positions enter once, before the first temporal attention."""
    model, seen = toy(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    x, t, y, mask = inputs()
    model(x, t, y, mask=mask)
    (x, y, t), w, D = seen[0][0][:3], model.state_dict(), 48  # x [B, T, S, D], y [B, L, D], t [B, 6, D]

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def modulated(x, shift, scale):
        return F.layer_norm(x, (D,), eps=1e-6) * (1 + scale) + shift

    def attention(q, k, v, bias=0.0):
        q, k, v = (rearrange(z, "... N (h d) -> ... h N d", h=2) for z in (q, k, v))
        return rearrange((q @ k.mT / 24**0.5 + bias).softmax(-1) @ v, "... h N d -> ... N (h d)")

    angles = torch.arange(3)[:, None] * 10000 ** (-torch.arange(D // 2) / (D // 2))
    positions = torch.cat([angles.sin(), angles.cos()], dim=1)[:, None]  # [T, 1, D]
    padding = torch.where(mask, 0.0, -torch.inf)[:, None, None, None]  # [B, 1, 1, 1, L]
    for i in range(2):
        p = f"blocks.{i}"
        table = (w[f"{p}.scale_shift_table"] + t)[:, :, None, None]
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = table.unbind(1)
        qkv = linear(f"{p}.attn.qkv", modulated(x, shift, scale)).chunk(3, dim=-1)
        x = x + gate * linear(f"{p}.attn.proj", attention(*qkv))
        timed = rearrange(x + positions if i == 0 else x, "B T S D -> B S T D")
        timed = attention(*linear(f"{p}.attn_temp.qkv", timed).chunk(3, dim=-1))
        x = x + gate * linear(f"{p}.attn_temp.proj", rearrange(timed, "B S T D -> B T S D"))
        k, v = linear(f"{p}.cross_attn.kv_linear", y)[:, None].chunk(2, dim=-1)
        x = x + linear(f"{p}.cross_attn.proj", attention(linear(f"{p}.cross_attn.q_linear", x), k, v, padding))
        hidden = F.gelu(linear(f"{p}.mlp.fc1", modulated(x, shift_mlp, scale_mlp)), approximate="tanh")
        x = x + gate_mlp * linear(f"{p}.mlp.fc2", hidden)
    torch.testing.assert_close(seen[-1][1], x, atol=1e-5, rtol=1e-5)


def test_frame_mask_all_true_is_no_mask():
    model = toy()
    x, t, y, mask = inputs()
    x_mask = torch.ones(2, 3, dtype=torch.bool)
    torch.testing.assert_close(model(x, t, y, mask=mask, x_mask=x_mask), model(x, t, y, mask=mask))


def test_frame_mask_all_false_is_timestep_zero():
    model = toy()
    x, t, y, mask = inputs()
    x_mask = torch.zeros(2, 3, dtype=torch.bool)
    torch.testing.assert_close(
        model(x, t, y, mask=mask, x_mask=x_mask), model(x, torch.zeros_like(t), y, mask=mask), atol=1e-6, rtol=1e-5
    )


def test_activation_checkpointing_changes_no_gradient():
    x, t, y, mask = inputs()
    plain, checkpointed = toy().train(), toy().train()
    checkpoint_activations(checkpointed.transformer_blocks())
    for model in (plain, checkpointed):
        model(x, t, y, mask=mask).square().mean().backward()
    assert plain.state_dict().keys() == checkpointed.state_dict().keys()
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_every_parameter_gets_a_gradient():
    x, t, y, mask = inputs()
    model = toy().train()
    model(x, t, y, mask=mask).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_flops_equal_the_counters():
    # the counter does not know PyTorch's CPU attention kernel, so the plain formula is measured
    model = toy(enable_flash_attn=False)
    x, t, y, _ = inputs(batch=1)
    with FlopCounterMode(display=False) as counter:
        model(x, t, y)
    assert model.flops((3, 6, 8), L) == counter.get_total_flops()


def test_bf16_autocast_stays_near_fp32():
    model = toy()
    x, t, y, mask = inputs()
    exact = model(x, t, y, mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        short = model(x, t, y, mask=mask)
    assert short.dtype == torch.float32
    assert (short - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize(("freeze", "part"), [("not_temporal", ".attn_temp."), ("text", ".attn.")])
def test_freeze(freeze, part):
    trained = [name for name, p in toy(freeze=freeze).named_parameters() if p.requires_grad]
    assert any(part in name for name in trained)
    assert all("cross_attn" not in name for name in trained)
    with pytest.raises(ValueError, match="not_temporal"):
        toy(freeze="all")


@pytest.mark.parametrize(("scale", "size"), [("space_scale", (1, 4, 4)), ("time_scale", (3, 2, 2))])
def test_a_scale_of_half_sees_the_span_of_the_larger_video(scale, size):
    whole, half = toy(), toy(**{scale: 0.5})
    half.load_state_dict(whole.state_dict())
    x, t, y, _ = inputs(size=size)
    assert not torch.allclose(whole(x, t, y), half(x, t, y))


class TestWeights:
    def test_a_checkpoint_folder_gives_its_average(self, tmp_path):
        a, b = toy(), toy()
        with torch.no_grad():
            for p in b.parameters():
                p.add_(1.0)
        parts = {"model": a.state_dict(), "ema": b.state_dict()}
        path = save_checkpoint(tmp_path / "c", parts, state={}, manifest={"step": 1})
        c = toy(from_pretrained=str(path))
        torch.testing.assert_close(c.state_dict(), b.state_dict())

    def test_released_pickles_load_with_tables_dropped_and_text_resized(self, tmp_path):
        state = toy().state_dict()
        state["pos_embed"] = torch.zeros(1, 9, 48)
        state["y_embedder.y_embedding"] = torch.randn(3, C_TEXT)
        torch.save({"state_dict": state}, tmp_path / "w.pth")
        model = toy(from_pretrained=str(tmp_path / "w.pth"))
        table = model.y_embedder.y_embedding
        torch.testing.assert_close(table[:3], state["y_embedder.y_embedding"])
        torch.testing.assert_close(table[3:], table[2:3].expand(L - 3, -1))

    def test_another_architecture_is_refused_with_names_and_shapes(self, tmp_path):
        torch.save(toy(depth=3).state_dict(), tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"(?s)does not fit this STDiT.*in the file only.*blocks\.2\."):
            toy(from_pretrained=str(tmp_path / "w.pth"))
        torch.save(toy(hidden_size=64).state_dict(), tmp_path / "v.pth")
        with pytest.raises(UserError, match=r"(?s)of another shape.*file \(64,\), model \(48,\)"):
            toy(from_pretrained=str(tmp_path / "v.pth"))

    def test_a_refused_file_leaves_the_model_alone(self, tmp_path):
        model = toy()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        torch.save(toy(depth=3).state_dict(), tmp_path / "w.pth")
        with pytest.raises(UserError):
            load_weights(model, tmp_path / "w.pth", convert_stdit)
        torch.testing.assert_close(model.state_dict(), before)

    def test_nothing_there(self):
        with pytest.raises(UserError, match="no weights at PRETRAINED_MODEL"):
            toy(from_pretrained="PRETRAINED_MODEL")
