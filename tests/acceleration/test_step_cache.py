"""Step caches against closed forms, and against the model without a cache."""

import pytest
import torch
from torch import nn

from opensora.acceleration.patching import wrap_forward
from opensora.acceleration.step_cache import build_step_cache
from opensora.acceleration.step_cache.pab import PAB, PRESETS, PABOptions, layers_of
from opensora.acceleration.step_cache.teacache import TeaCache, modulated_input
from opensora.models.dit.dit import DiT
from opensora.models.latte.latte import Latte
from opensora.models.stdit.stdit import STDiT
from opensora.models.stdit.stdit3 import STDiT3
from opensora.utils.errors import UserError
from tests.models.denoisers import FAMILIES, build
from tests.models.denoisers import inputs as family_inputs

SMALL = {"hidden_size": 32, "depth": 2, "num_heads": 2}
OPENSORA_STEPS = [999 - i * 1000 / 30 for i in range(30)]
LATTE_STEPS = [981 - 20 * i for i in range(50)]


def with_random_weights(model: nn.Module) -> nn.Module:
    """New models predict zero; with weights everywhere, every layer has an effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model.requires_grad_(False).eval()


@pytest.fixture
def model():
    return with_random_weights(STDiT3(caption_channels=16, model_max_length=4, **SMALL))


def inputs(batch: int = 2, size: tuple[int, int, int] = (3, 4, 6), seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, *size, generator=generator)
    y = torch.randn(batch, 1, 4, 16, generator=generator)
    return {"x": x, "y": y, **{name: torch.full((batch,), 8.0) for name in ("fps", "height", "width")}}


def run(model: nn.Module, cache, timesteps, arguments=None, calls: int = 1) -> list[torch.Tensor]:
    """The model's outputs over the steps, each fed with what comes of the one before."""
    arguments = arguments or inputs()
    outputs = []
    with cache.sampling(timesteps):
        for index, t in enumerate(timesteps):
            cache.step(index)
            for _ in range(calls):
                out = model(timestep=torch.full((len(arguments["x"]),), float(t)), **arguments)
            outputs.append(out)
            arguments = {**arguments, "x": arguments["x"] - 0.02 * out[:, :4]}
    return outputs


def installed(model: nn.Module, cache):
    cache.install(model.transformer_blocks())
    return cache


@pytest.mark.parametrize(
    ("preset", "timesteps", "reused"),
    [("opensora", OPENSORA_STEPS, (7, 10, 12)), ("latte", LATTE_STEPS, (17, 24, 29))],
)
def test_hits_are_those_of_the_published_settings(model, preset, timesteps, reused):
    cache = installed(model, PAB(PRESETS[preset]))
    run(model, cache, timesteps)
    layers = {"spatial": 2, "temporal": 2, "cross": 4}
    for (kind, count), hits in zip(layers.items(), reused, strict=True):
        assert cache.reused[kind] == count * hits
        assert cache.computed[kind] == count * (len(timesteps) - hits)


def test_a_cache_without_effect_is_reported(model, caplog):
    """Four steps leave none between the thresholds that is not the first of its range."""
    cache = installed(model, PAB(PABOptions((2, 2, 2), ((450, 700),) * 3, {})))
    run(model, cache, [999, 749, 499, 249])
    assert "PAB reused nothing in 4 steps" in caplog.text
    caplog.clear()
    run(model, cache, [999, 699, 499, 249])
    assert caplog.text == ""


def test_mlps_are_skipped_after_the_steps_of_the_table(model):
    options = PABOptions((1, 1, 1), ((0, 0),) * 3, {700: ((0, 5), 2), 340: ((1,), 9)})
    cache = installed(model, PAB(options))
    run(model, cache, [900, 710, 500, 300, 100])
    # block 0: stored at 710 and reused twice; block 1: stored at 300, and one step is left; both kinds of block
    for kind in ("mlp spatial", "mlp temporal"):
        assert (cache.computed[kind], cache.reused[kind]) == (2 * 5 - 3, 3)


@pytest.mark.parametrize("options", [((1, 1, 1), ((0, 1000),) * 3), ((2, 4, 6), ((500, 500),) * 3)])
def test_ranges_of_one_or_empty_thresholds_change_no_bit(model, options):
    timesteps = [900, 700, 500, 300]
    plain = run(model, PAB(PRESETS["opensora"]), timesteps)  # not installed
    cache = installed(model, PAB(PABOptions(*options, {})))
    assert all(torch.equal(a, b) for a, b in zip(plain, run(model, cache, timesteps), strict=True))
    assert sum(cache.reused.values()) == 0


def test_what_is_reused_is_the_attentions_output(model):
    """One layer alone is broadcast: the result is the model's with that layer's output of step 0."""
    timesteps, block = [800, 700], model.spatial_blocks[0]
    cache = installed(model, PAB(PABOptions((2, 1, 1), ((0, 1000),) * 3, {})))
    cached = run(model, cache, timesteps)
    cache.remove()

    kept: dict[nn.Module, torch.Tensor] = {}

    def first_output(forward):
        def call(x, *args):
            if forward not in kept:
                kept[forward] = forward(x, *args)
            return kept[forward]

        return call

    undo = [wrap_forward(block.attn, first_output) for block in model.spatial_blocks]
    expected = run(model, PAB(PRESETS["opensora"]), timesteps)
    for put_back in undo:
        put_back()
    assert all(torch.equal(a, b) for a, b in zip(cached, expected, strict=True))
    assert "forward" not in block.attn.__dict__


@pytest.mark.parametrize("make", [lambda: PAB(PRESETS["opensora"]), lambda: TeaCache(1e9)])
def test_nothing_stays_from_one_run_to_the_next(model, make):
    timesteps = [900, 800, 700, 600, 500]
    cache = installed(model, make())
    first = run(model, cache, timesteps)
    assert sum(cache.reused.values()) > 0
    run(model, cache, timesteps, inputs(batch=1, size=(5, 2, 4), seed=1))
    again = run(model, cache, timesteps)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("make", [lambda: PAB(PRESETS["opensora"]), lambda: TeaCache(1e9)])
def test_another_batch_within_a_run_is_computed(model, make):
    """Guidance that stops halfway through halves the batch."""
    timesteps = [900, 800, 700, 600]
    cache, whole, half = installed(model, make()), inputs(), inputs(batch=1)
    with cache.sampling(timesteps):
        for index, t in enumerate(timesteps):
            cache.step(index)
            arguments = whole if index < 2 else half
            out = model(timestep=torch.full((len(arguments["x"]),), float(t)), **arguments)
            if index == 2:
                torch.testing.assert_close(out, plain_output(model, cache, arguments, t))
    assert sum(cache.reused.values()) > 0


def plain_output(model, cache, arguments, t):
    index, cache.index = cache.index, None  # outside of sampling a cache does nothing
    out = model(timestep=torch.full((len(arguments["x"]),), float(t)), **arguments)
    cache.index = index
    return out


def test_both_halves_of_guidance_in_two_calls_are_as_in_one(model):
    timesteps = [900, 800, 700, 600, 500, 400]
    cond, null = inputs(batch=1), inputs(batch=1, seed=1)
    joint = {name: torch.cat([cond[name], null[name]]) for name in cond}
    cache = installed(model, PAB(PRESETS["opensora"]))
    together = run_twice(model, cache, timesteps, [joint])
    apart = run_twice(model, cache, timesteps, [cond, null])
    for both, parts in zip(together, apart, strict=True):
        torch.testing.assert_close(both[0], torch.cat(parts), atol=1e-5, rtol=1e-5)


def run_twice(model, cache, timesteps, each):
    outputs = []
    with cache.sampling(timesteps):
        for index, t in enumerate(timesteps):
            cache.step(index)
            outputs.append([model(timestep=torch.full((len(a["x"]),), float(t)), **a) for a in each])
    return outputs


def test_teacache_skips_by_the_added_distances(model):
    timesteps = [900, 800, 700, 600, 500, 400, 300]
    exact = run(model, TeaCache(0.0), timesteps)
    cache = installed(model, TeaCache(0.0))
    assert all(torch.equal(a, b) for a, b in zip(exact, run(model, cache, timesteps), strict=True))
    cache.threshold = 1e9
    run(model, cache, timesteps)
    assert (cache.computed["step"], cache.reused["step"]) == (2, 5)  # the first and the last are computed


def test_teacaches_distance_is_that_of_the_first_attentions_input():
    for make in (
        lambda: STDiT(caption_channels=16, model_max_length=4, **SMALL),
        lambda: Latte(caption_channels=16, **SMALL),
    ):
        model = with_random_weights(make())
        block = model.transformer_blocks()[0]
        seen = {}

        def watch(forward, seen=seen):
            def call(x, *args):
                seen["attention"] = x
                return forward(x, *args)

            return call

        def enter(_, args, seen=seen):
            seen["modulated"] = modulated_input(seen["block"], args[0], args[1:])

        seen["block"] = block
        undo, hook = wrap_forward(block.attn, watch), block.register_forward_pre_hook(enter)
        arguments = inputs()
        if isinstance(model, Latte):
            arguments["y"] = arguments["y"][:, :, :1]
        model(timestep=torch.tensor([500.0, 500.0]), **arguments)
        torch.testing.assert_close(seen["modulated"], seen["attention"])
        undo()
        hook.remove()


def test_a_skipped_step_adds_the_last_residual_whatever_lies_between_blocks():
    """Latte adds positions between its first two blocks: they belong to the residual, and are not added twice."""
    model = with_random_weights(Latte(caption_channels=16, **SMALL))
    arguments = inputs()
    arguments["y"] = arguments["y"][:, :, :1]
    cache = installed(model, TeaCache(1e9))
    entered, left = [], []
    first, last = model.blocks[0], model.blocks[-1]
    first.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    last.register_forward_hook(lambda *_: left.append(_[2]))
    run(model, cache, [900, 800, 700], arguments)
    torch.testing.assert_close(left[1] - entered[1], left[0] - entered[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_denoiser_takes_both_caches(family):
    model = build(family)
    arguments = {name: value for name, value in family_inputs(model).items() if name != "timestep"}
    for cache in (PAB(PRESETS["opensora"]), TeaCache(1e9)):
        run(model, installed(model, cache), [900, 800, 700, 600], arguments)
        assert sum(cache.reused.values()) > 0
        cache.remove()


def test_two_experts_are_for_pab_alone():
    model = build("Wan-I2V", expert="both")
    assert isinstance(build_step_cache({"type": "pab"}, model), PAB)
    with pytest.raises(UserError, match="two experts"):
        build_step_cache({"type": "teacache"}, model)


def test_kinds_and_numbers_of_layers():
    model = STDiT3(caption_channels=16, model_max_length=4, **SMALL)
    found = [(kind, number) for kind, number, _ in layers_of(model.transformer_blocks())]
    one = [("spatial", 0), ("cross", 0), ("mlp spatial", 0), ("temporal", 0), ("cross", 0), ("mlp temporal", 0)]
    assert found == [*one, *((kind, 1) for kind, _ in one)]
    kinds = {
        kind for kind, *_ in layers_of(STDiT(caption_channels=16, model_max_length=4, **SMALL).transformer_blocks())
    }
    assert kinds == {"spatial", "temporal", "cross", "mlp spatial"}
    assert {kind for kind, *_ in layers_of(DiT(caption_channels=16, **SMALL).transformer_blocks())} == {
        "spatial",
        "mlp spatial",
    }


def test_presets_follow_the_family(model):
    for one, preset in (
        (model, "opensora"),
        (Latte(caption_channels=16, **SMALL), "latte"),
        (DiT(caption_channels=16, **SMALL), "cogvideox"),
    ):
        assert build_step_cache({"type": "pab"}, one).options == PRESETS[preset]
    changed = build_step_cache({"type": "pab", "ranges": (3, 5, 7), "thresholds": (100, 900), "mlp": {}}, model)
    assert changed.options == PABOptions((3, 5, 7), ((100.0, 900.0),) * 3, {})
    assert build_step_cache(None, model) is None
    assert build_step_cache({"type": "teacache", "threshold": 0.3}, model).threshold == 0.3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "pap"}, "step_cache.type='pap' is not one of pab, teacache"),
        ({"type": "pab", "threshold": 1}, "no 'threshold'"),
        ({"type": "pab", "preset": "sora"}, "preset='sora'"),
        ({"type": "pab", "ranges": (2, 4)}, "ranges"),
        ({"type": "pab", "ranges": (2, 4, 0)}, "ranges"),
        ({"type": "pab", "thresholds": 450}, "thresholds"),
        ({"type": "pab", "mlp": {600: 2}}, "mlp"),
        (
            {"type": "pab", "mlp": {800: ((0, 99), 2)}},
            "timestep 800 names block 99, and the blocks of a STDiT3? are 0 to",
        ),
        ({"type": "teacache", "threshold": -1}, "threshold"),
    ],
)
def test_mistakes_in_the_config_are_named(model, config, message):
    with pytest.raises(UserError, match=message):
        build_step_cache(config, model)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_blocks_do_the_same(model):
    """With the cache inside blocks they are compiled in parts; the backend compiles nothing, for a CPU has no fast one."""
    timesteps = [900, 800, 700, 600, 500]
    cache = installed(model, PAB(PRESETS["opensora"]))
    expected = run(model, cache, timesteps)
    cache.remove()
    torch._dynamo.reset()
    cache.install(model.transformer_blocks(), compiled=True)
    for block in model.transformer_blocks():
        wrap_forward(block, lambda forward: torch.compile(forward, backend="eager"))
    for a, b in zip(expected, run(model, cache, timesteps), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert cache.reused["spatial"] > 0
    torch._dynamo.reset()
