"""Dtypes and memory of Wan's weights: what is stored in bf16, what a load allocates, and how near bf16 comes to fp32."""

from itertools import accumulate

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.profiler import ProfilerActivity, profile

from opensora.models.loading import store_frozen
from opensora.registry import MODELS
from tests.models.denoisers import FAMILIES, inputs
from tests.models.denoisers import build as family
from tests.models.wan.toys import TINY, build
from tests.models.wan.toys import inputs as wan_inputs


def peak_bytes(make, mapped):
    """What `make` returns, and the most bytes that PyTorch had at one time meanwhile, without files of the sizes `mapped`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        made = make()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in events if abs(event.nbytes()) not in mapped]
    return made, max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("frozen_weights", ["fp32", "bf16", "fp8", "int8"])
def test_a_load_takes_the_memory_of_the_stored_weights_and_one_more(frozen_weights, tmp_path):
    sizes = {**TINY, "type": "Wan", "in_channels": 4, "hidden_size": 120, "ffn_dim": 480}
    exact = MODELS.build(sizes)
    exact.net.save_pretrained(tmp_path, max_shard_size="500KB")
    shards = {file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    settings = {**sizes, "from_pretrained": str(tmp_path), "frozen_weights": frozen_weights}
    model, peak = peak_bytes(lambda: MODELS.build(settings), shards)
    store_frozen(exact, frozen_weights)
    for name, tensor in exact.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(model.state_dict()[name].dtype))
    kept = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert peak < kept + 4 * max(parameter.numel() for parameter in model.parameters())
    cond = wan_inputs(exact)  # the tables of positions are there, though no file has them
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(**cond), exact(**cond))


def test_random_weights_are_made_where_they_are_wanted():
    model = build("t2v", device="meta", frozen_weights="bf16")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.net.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


def test_products_are_stored_in_bf16_and_nothing_else():
    dtypes = {name: p.dtype for name, p in build("i2v", frozen_weights="bf16").net.named_parameters()}
    short = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert {"patch_embedding.weight", "proj_out.weight", "blocks.1.ffn.net.2.weight"} < short
    assert all(name.endswith(".weight") and "norm" not in name and "condition_embedder" not in name for name in short)
    assert len(short) == 2 + 2 * (4 + 6 + 2)
    kept = ("time_embedder", "scale_shift_table", "norm")  # in fp32 by diffusers
    assert all(dtype == torch.float32 for name, dtype in dtypes.items() if any(part in name for part in kept))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_autocast_computes_the_same_to_the_bit(name):
    model = family(name)
    cond = inputs(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**cond)
        store_frozen(model, "bf16")
        assert any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        assert torch.equal(model(**cond), expected)


@torch.no_grad()
def test_bf16_is_at_least_as_near_to_fp32_as_diffusers(tmp_path):
    """With a timestep that matters: its modulation is larger than in a random network."""
    model = build("t2v", depth=4, hidden_size=48)
    model.net.condition_embedder.time_proj.weight.mul_(10)
    model.net.save_pretrained(tmp_path)
    half = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    x, y = torch.randn(16, 4, 2, 8, 8), torch.randn(16, 1, 512, 16)
    t = torch.linspace(3.5, 993.5, 16)
    modulations = []
    model.net.blocks[0].register_forward_pre_hook(lambda _, args: modulations.append(args[2]))
    exact = model(x, t, y)
    theirs = -half(x.bfloat16(), t, y[:, 0].bfloat16(), return_dict=False)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(x, t, y)
    in_fp32 = model.net.condition_embedder(t, y[:, 0])[1].unflatten(1, (6, -1))
    assert torch.equal(modulations[1], in_fp32)
    assert (ours - exact).norm() <= (theirs - exact).norm()
