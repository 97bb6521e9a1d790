"""Quantised frozen weights against closed forms of the rounding, and against a layer with the de-quantised weights."""

import copy

import pytest
import torch
from torch import nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.checkpoint.lora import Adapter, merge_adapter
from opensora.config.schema import LoraOptions
from opensora.models.loading import store_frozen
from opensora.models.quantised_linear import (
    QUANTISED,
    QuantisedLinear,
    dequantise,
    quantise,
    quantised_linear,
)
from opensora.training.lora import add_lora
from opensora.utils.errors import UserError
from tests.acceleration.products import Products
from tests.models.denoisers import FAMILIES, build, inputs

KINDS = list(QUANTISED)


def weights():
    """Rows from tiny to large, one of zeros, one with an outlier."""
    torch.manual_seed(0)
    weight = torch.randn(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    weight[3] = 0
    weight[4, 5] = 1e5
    return weight


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_within_the_bounds_of_the_rounding(kind):
    weight = weights()
    stored, scale = quantise(weight, QUANTISED[kind])
    assert (stored.dtype, stored.shape, scale.dtype, scale.shape) == (QUANTISED[kind], (40, 96), torch.float32, (40, 1))
    error = (dequantise(stored, scale, torch.float32) - weight).abs()
    if kind == "int8":
        assert (error <= scale / 2 * (1 + 1e-5)).all()
        assert stored.float().abs().amax(1)[[0, 1, 2, 4]].eq(127).all()  # the whole range is used
    else:
        assert (error <= torch.maximum(weight.abs() / 16, scale / 1024)).all()
        assert stored.float().abs().amax(1)[[0, 1, 2, 4]].ge(224).all()
        again = quantise(dequantise(stored, scale, torch.bfloat16), QUANTISED[kind])
        assert torch.equal(dequantise(*again, torch.bfloat16).float(), dequantise(stored, scale, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_a_number(kind, bad):
    weight = weights()
    weight[7, 7] = bad
    back = dequantise(*quantise(weight, QUANTISED[kind]), torch.float32)
    assert not back[7, 7].isfinite()
    assert back[:7].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_operation_is_one_that_pytorch_can_trace(kind):
    layer = QuantisedLinear(nn.Linear(8, 6), QUANTISED[kind])
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = (torch.randn(2, 3, 8, requires_grad=True), layer.weight, layer.weight_scale, layer.bias)
    torch.library.opcheck(quantised_linear, args, test_utils=checks)  # its own comparison knows no float8


def dequantised(model):
    """The same with plain layers of the de-quantised weights."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, QuantisedLinear):
                linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                linear.weight, linear.bias = nn.Parameter(dequantise(layer.weight, layer.weight_scale, torch.float32), requires_grad=False), layer.bias  # fmt: skip
                setattr(parent, name, linear)
    return plain


def step(model, dtype=torch.float32):
    """Prediction of a training pass, and the gradients of what is trained."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32):
        prediction = model(**{name: tensor.to(device) for name, tensor in inputs(model).items()})
    prediction.square().mean().backward()
    return prediction.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def adapted(family, kind, level="none", *, backend=None, **changes):
    """A denoiser in fp32 on a quantised base, with adapters whose B is not zero, and the same with de-quantised weights."""
    model = build(family, **changes).train()
    store_frozen(model, kind)
    for layer in model.modules():  # the rest in fp32: the bound is that of the layers that are tested here
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d) and not isinstance(layer, QuantisedLinear):
            layer.float()
    add_lora(model, LoraOptions(rank=2, target_modules="all-linear"), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    plain = dequantised(model)
    if backend:
        compile_blocks(model.transformer_blocks(), backend=backend)
    checkpoint_activations(model.transformer_blocks(), level)
    return model, plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ("Wan", "STDiT3", "PixArt-Sigma-compressed")])
def test_predictions_and_gradients_are_those_of_the_dequantised_weights(family, kind):
    pytest.importorskip("peft", reason="pip install peft")
    model, plain = adapted(family, kind)
    found, expected = step(model), step(plain)
    assert any(gradient.any() for gradient in found[1].values())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "kind"), [("none", "fp8"), ("attention", "int8"), ("selective", "int8")])
def test_compiled_blocks_keep_the_stored_weights_alone(level, kind):
    """The partitioner of torch.compile would keep a weight that it sees being made: for it that is a product's operand."""
    pytest.importorskip("peft", reason="pip install peft")
    model, plain = adapted("Wan", kind, level, backend="aot_eager_decomp_partition", depth=1)
    shapes = {tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, QuantisedLinear)}
    shapes |= {shape[::-1] for shape in shapes}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        found = step(model)
    weights = [tensor for tensor in kept if tuple(tensor.shape) in shapes]
    assert weights
    assert {tensor.dtype for tensor in weights} == {QUANTISED[kind]}
    torch.testing.assert_close(found, step(plain), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("level", "forwards"), [("none", 1), ("attention", 2), ("selective", 1), ("block", 2)])
def test_products_of_checkpointed_blocks_are_kept_or_repeated_as_of_plain_layers(level, forwards):
    pytest.importorskip("peft", reason="pip install peft")
    model, plain = adapted("Wan", "int8", level)
    with Products() as products:
        found = step(model)
    layers = sum(isinstance(layer, QuantisedLinear) for layer in model.modules())
    assert products.count["opensora::quantised_linear"] == forwards * layers
    torch.testing.assert_close(found, step(plain), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_of_the_blocks_are_quantised_and_the_islands_are_not(kind):
    model = build("Wan")
    for _ in range(2):  # what is quantised stays
        store_frozen(model, kind)
    layers = {name: layer for name, layer in model.named_modules() if getattr(layer, "weight", None) is not None}
    for name, layer in layers.items():
        dtype = layer.weight.dtype
        if name.startswith("net.blocks.") and isinstance(layer, nn.Linear):
            assert (type(layer), dtype) == (QuantisedLinear, QUANTISED[kind]), name
        elif name in ("net.patch_embedding", "net.proj_out"):
            assert dtype == torch.bfloat16, name
        else:
            assert dtype == torch.float32, name
    assert {n for n, p in model.named_parameters() if p.dtype == QUANTISED[kind]} == {
        n.removesuffix("_scale") for n in model.state_dict() if n.endswith("weight_scale")
    }
    modulation = build("DiT-text")  # inside the blocks, outside autocast
    store_frozen(modulation, kind)
    islands = [part for part in modulation.modules() if getattr(part, "outside_autocast", False)]
    assert not any(isinstance(layer, QuantisedLinear) for part in islands for layer in part.modules())


def test_first_values_of_adapters_are_not_rounded_to_the_bases_dtype():
    pytest.importorskip("peft", reason="pip install peft")
    model, _ = adapted("Wan", "fp8")
    initial = [p for name, p in model.named_parameters() if "lora_A" in name]
    assert initial
    assert not any(torch.equal(p, p.to(torch.float8_e4m3fn).float()) for p in initial)


def test_an_adapter_is_not_merged_into_quantised_weights():
    model = build("Wan")
    layer = "net.blocks.0.attn1.to_q"
    width = model.get_submodule(layer).in_features
    adapter = Adapter({layer: (torch.ones(1, width), torch.ones(width, 1))})
    store_frozen(model, "int8")
    before = model.get_submodule(layer).weight.clone()
    with pytest.raises(UserError, match="cannot be merged into quantised weights"):
        merge_adapter(model, adapter)
    assert torch.equal(model.get_submodule(layer).weight, before)
