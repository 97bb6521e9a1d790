"""LoRAs exchanged under a compiled model: the outputs of merged weights, the base again bit for bit, and no new program."""

import pytest
import torch

from opensora.acceleration.compiler import Adapters, compile
from opensora.checkpoint.lora import Adapter, merge_adapter, write_adapter
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import TOY, inputs


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    built = MODELS.build({"type": "DiT-XL/2", **TOY, "depth": 2}).eval()
    with torch.no_grad():
        for parameter in built.parameters():  # layers that start at zero too
            parameter.normal_(std=0.1)
    return built


def adapter(layers: list[str], seed: int) -> Adapter:
    rng = torch.Generator().manual_seed(seed)
    shapes = {name: model().get_submodule(name).weight.shape for name in layers}
    return Adapter(
        {n: (torch.randn(3, s[1], generator=rng), torch.randn(s[0], 3, generator=rng)) for n, s in shapes.items()}, 0.05
    )


@pytest.fixture
def paths(tmp_path):
    """Two that share a layer."""
    names = [
        name
        for name, module in model().named_modules()
        if name.startswith("blocks.") and type(module) is torch.nn.Linear
    ]
    chosen = {"style": adapter(names[:3], 1), "motion": adapter(names[2:5], 2)}
    return {name: write_adapter(one, tmp_path / name) for name, one in chosen.items()}, chosen


@torch.no_grad()
def test_switching_compiles_nothing_and_ends_at_the_base(paths, programs):
    folders, adapters = paths
    one, cond = model(), inputs(model())
    base = one(**cond)
    compile(one, backend="counting")
    loras = Adapters(one, folders)
    one(**cond)
    count = len(programs)
    assert count > 0
    for scales in ({"style": 1.0}, {"style": 0.5, "motion": -0.8}, {"motion": 1.0}):
        loras.use(scales)
        merged = model()
        for name, scale in scales.items():
            merge_adapter(merged, adapters[name], scale)
        expected = merged(**cond)
        assert not torch.allclose(expected, base, atol=1e-3)
        torch.testing.assert_close(one(**cond), expected, atol=1e-5, rtol=1e-4)
    loras.use({})
    torch.testing.assert_close(one.state_dict(), model().state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(one(**cond), base, atol=1e-5, rtol=1e-4)
    assert len(programs) == count


def test_what_cannot_be_switched_is_reported(paths):
    folders, _ = paths
    with pytest.raises(UserError, match=r"no LoRA 'stile'. Did you mean 'style'"):
        Adapters(model(), folders).use({"stile": 1.0})
    frozen = compile(model(), options={"mode": "freezing"})
    with pytest.raises(UserError, match="compiled with freezing, after which its weights cannot change"):
        Adapters(frozen, folders)
    made_first = Adapters(one := model(), folders)
    compile(one, options={"mode": "freezing"})
    with pytest.raises(UserError, match="compiled with freezing"):
        made_first.use({"style": 1.0})
    with pytest.raises(UserError, match="does not fit this Linear"):
        Adapters(torch.nn.Linear(2, 2), folders).use({"style": 1.0})


def test_weights_stay_as_they_were_when_one_adapter_does_not_fit(paths, tmp_path):
    folders, chosen = paths
    other = Adapter({"nowhere": next(iter(chosen["style"].factors.values()))}, 1.0)
    loras = Adapters(one := model(), {**folders, "other": write_adapter(other, tmp_path / "other")})
    for scales in ({}, {"motion": 0.5}):
        loras.use(scales)
        before = {name: weight.clone() for name, weight in one.state_dict().items()}
        with pytest.raises(UserError, match="LoRA 'other' does not fit this"):
            loras.use({"style": 1.0, "other": 1.0})
        torch.testing.assert_close(one.state_dict(), before, atol=0, rtol=0)


@pytest.mark.extra
@pytest.mark.parametrize("backend", ["aot_eager", "none"])
def test_adapters_made_before_weights_are_quantised_are_reported(paths, backend):
    pytest.importorskip("torchao")
    loras = Adapters(one := model(), paths[0])
    compile(one, backend=backend, options={"mode": "quant", "quant_min_features": 16})
    for scales in ({"style": 1.0}, {}):
        with pytest.raises(UserError, match="compiled with quant, after which its weights cannot change"):
            loras.use(scales)
    with pytest.raises(UserError, match="compiled with quant"):
        Adapters(one, paths[0])
