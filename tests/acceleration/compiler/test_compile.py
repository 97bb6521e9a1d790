"""`compile`: the seed's snippet, one program for many sizes, and the rules that hold while a program runs.

Most tests compile with "aot_eager" or a backend that counts programs, which need no C++ compiler; one uses inductor.
"""

import copy
import shutil
import sys

import pytest
import torch
from torch import nn

from opensora.acceleration.compile import nexfort, quantise, repeated_blocks
from opensora.acceleration.compile.nexfort import record_of, restore
from opensora.acceleration.compiler import compile
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.errors import UserError
from tests.acceleration.compiler.toys import Toy, pixart, toy
from tests.models.denoisers import TOY, inputs

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def image(batch: int = 2, height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch * height * width))


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
@pytest.mark.nightly
def test_the_seeds_snippet(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x = toy(), image()
    expected, names = module(x), list(module.state_dict())

    options = {"mode": "O3"}  # mode can be O2 or O3
    compiled = compile(module, backend="nexfort", options=options)

    torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)
    assert compiled is module
    assert isinstance(compiled, Toy)
    assert list(compiled.state_dict()) == names
    assert options == {"mode": "O3"}
    assert [file for file in tmp_path.rglob("*") if file.is_file()], "the program is in the cache"


@torch.no_grad()
def test_one_program_serves_all_sizes(programs):
    module = compile(toy(), backend="counting", options={"dynamic": True})
    for height, width in ((16, 16), (16, 24), (32, 8)):  # a square comes first, and does not make a program for squares
        torch.testing.assert_close(module(image(2, height, width)), toy()(image(2, height, width)))
    assert len(programs) == 1
    module(image(1, 16, 24))  # a batch of one is another program, and the last
    module(image(5, 40, 8))
    assert len(programs) == 2


@pytest.mark.slow
@torch.no_grad()
def test_buckets_are_one_program_each(programs):
    module = compile(toy(), backend="counting", options={"dynamic": "buckets"})
    sizes = [(8 * (1 + i), 16) for i in range(10)]  # more than dynamo's own limit of 8
    for _ in range(2):
        for height, width in sizes:
            module(image(2, height, width))
    assert len(programs) == len(sizes)


@torch.no_grad()
def test_compiling_again_does_not_nest(programs):
    module = compile(toy(), backend="counting")
    module(image())
    again = compile(module, backend="counting", options={"dynamic": True})
    again(image())
    assert again is module
    assert len(programs) == 2
    wrapped = torch.compile(toy())
    assert compile(wrapped, backend="counting") is wrapped._orig_mod
    plain = compile(module, backend="none")
    assert plain._compiled_call_impl is None
    assert record_of(plain) is None


def test_functions_and_decorators(programs):
    @compile(backend="counting")
    def double(x):
        """Twice."""
        return 2 * x

    assert double(torch.ones(2)).tolist() == [2, 2]
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    again = compile(double, backend="counting")
    assert again(torch.ones(2)).tolist() == [2, 2]
    assert again.__wrapped__ is double.__wrapped__
    assert compile(double, backend="none") is double.__wrapped__
    with pytest.raises(UserError, match="double is a function: quant, jit"):
        compile(double, options={"mode": "quant"})


def test_methods(programs):
    class Scale:
        factor = 3

        @compile(backend="counting")
        def times(self, x):
            """Scaled."""
            return self.factor * x

        @staticmethod
        @compile(backend="counting")
        def twice(x):
            return 2 * x

    scale = Scale()
    assert scale.times(torch.ones(2)).tolist() == [3, 3]
    assert Scale.times(scale, x=torch.ones(2)).tolist() == [3, 3]
    assert scale.twice(torch.ones(2)).tolist() == [2, 2]
    assert scale.times.__self__ is scale
    assert scale.times.__doc__ == "Scaled."
    assert len(programs) == 2


def test_training_a_compiled_module(programs):
    plain, module = toy().train(), compile(toy().train(), backend="counting")
    for one in (plain, module):
        one(image()).square().mean().backward()
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_copy_is_not_compiled():
    module = compile(toy(), backend="aot_eager")
    assert copy.deepcopy(module)._compiled_call_impl is None


@needs_compiler
def test_freezing_wants_constant_weights():
    module = compile(toy(), options={"mode": "freezing"})
    with pytest.raises(UserError, match=r"call it under torch.no_grad"):
        module(image())
    with pytest.raises(UserError, match="compiled with freezing: its weights are constants"):
        module.load_state_dict(module.state_dict())
    restore(module)
    module.load_state_dict(module.state_dict())
    adapted = toy()
    adapted.fc1.lora_A = nn.Linear(8, 2)
    for wrong in (toy().train(), adapted):
        with pytest.raises(UserError, match=r"call .eval\(\) and merge adapters"):
            compile(wrong, options={"mode": "freezing"})


@pytest.fixture
def frozen(monkeypatch):
    """Of each program with constants: inputs before and after weights were made constants."""
    import torch._inductor.freezing as freezing

    made, freeze = [], freezing.freeze

    def counted(module, graph, inputs, *args):
        out = freeze(module, graph, inputs, *args)
        made.append((len(inputs), len(out[1])))
        return out

    monkeypatch.setattr(freezing, "freeze", counted)
    return made


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
def test_frozen_weights_are_no_inputs_of_the_program(frozen):
    module, x = toy(), image()
    expected = module(x)
    compile(module)(x)  # a program with the weights as inputs is not taken instead
    compile(module, options={"mode": "freezing"})
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)
    assert frozen == [(1 + len(list(module.parameters())), 1)]
    assert not torch._inductor.config.freezing
    module(image(2, 24, 16))  # as well in programs for later sizes
    assert [kept for _, kept in frozen[1:]] in ([1], [2])  # with the size itself, if the program is dynamic


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("isolates", [True, False], ids=["this PyTorch", "one without isolate_recompiles"])
@torch.no_grad()
def test_frozen_weights_that_changed_are_in_the_program_when_it_is_compiled_again(monkeypatch, isolates):
    knows = nexfort.knows
    monkeypatch.setattr(nexfort, "knows", lambda argument: knows(argument) and (isolates or "isolate" not in argument))
    module, x = toy(), image()
    compile(module, options={"mode": "freezing"})(x)
    restore(module)
    module.fc1.weight.mul_(2)
    expected = module(x)
    compile(module, options={"mode": "freezing"})
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("without_code")
@torch.no_grad()
def test_our_denoisers_are_frozen_as_a_whole(frozen):
    model = MODELS.build({"type": "DiT-XL/2", **TOY, "depth": 2}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    cond = inputs(model)
    expected = model(**cond)
    compile(model, options={"mode": "freezing"})
    assert compiled_calls(model) == [model]  # block by block each would be a program of its own
    torch.testing.assert_close(model(**cond), expected, atol=1e-4, rtol=1e-4)
    assert frozen
    assert all(kept < given for given, kept in frozen)


@pytest.mark.parametrize(
    "options", [{"regional": False}, {"mode": "cudagraphs"}, {"mode": "freezing", "regional": True}]
)
def test_a_model_whose_parts_are_called_is_compiled_by_blocks_or_not_at_all(options):
    model = nova()
    with pytest.raises(UserError, match="compiled by blocks alone: leave out freezing, cudagraphs"):
        compile(model, options=options)
    assert record_of(model) is None


@torch.no_grad()
def test_sampling_by_parts_runs_the_blocks_programs(programs):
    model = nova()
    compile(model, backend="counting")
    scheduler = SCHEDULERS.build({"type": "nova", "num_sampling_steps": 1, "num_diffusion_steps": 1, "cfg_scale": 1.0})
    scheduler.sample(model, torch.randn(1, 4, 1, 4, 4), {"y": torch.randn(1, 1, 4, 8)}, generators=[torch.Generator()])
    assert programs


def nova() -> nn.Module:
    torch.manual_seed(0)
    return MODELS.build(
        {"type": "NOVA", "width": 32, "num_heads": 2, "video_depth": 1, "image_depth": 2, "head_depth": 1, "motion": False,
         "caption_channels": 8, "model_max_length": 4}
    ).eval()  # fmt: skip


@pytest.mark.parametrize(("mode", "reduced"), [("O2", False), ("low-precision", True)])
def test_low_precision_is_set_for_the_process(mode, reduced):
    compile(toy(), options={"mode": mode})
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is reduced
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction is reduced


def compiled_calls(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if one._compiled_call_impl is not None]


@pytest.mark.nightly
@pytest.mark.slow
@torch.no_grad()
def test_our_denoisers_compile_block_by_block(programs):
    torch.manual_seed(0)
    model = MODELS.build({"type": "STDiT-XL/2", **TOY, "depth": 4}).eval()
    cond = inputs(model)
    expected, names = model(**cond), list(model.state_dict())
    compile(model, backend="counting")
    torch.testing.assert_close(model(**cond), expected, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == names
    assert len(programs) == 2  # one for the first block, which adds positions in time, one for all others
    assert model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in model.transformer_blocks())
    compile(model, backend="counting", options={"dynamic": True})
    del programs[:]
    for size in ((2, 4, 4), (3, 4, 6), (4, 8, 2), (5, 6, 6)):
        model(**{**cond, "x": torch.randn(2, 4, *size)})
    assert len(programs) == 2  # four sizes later there is none more
    restore(model)
    assert all(block._compiled_call_impl is None for block in model.transformer_blocks())


def test_blocks_of_diffusers():
    transformer = pixart().transformer
    assert len(repeated_blocks(transformer)) == 2
    assert repeated_blocks(toy()) == []
    compile(transformer, backend="aot_eager", options={"regional": True})
    assert transformer._compiled_call_impl is None
    assert compiled_calls(transformer) == repeated_blocks(transformer)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("nexfrt", {}, "no compiler backend 'nexfrt'. Did you mean 'nexfort'"),
        ("aot_eager", {"regional": True}, "Toy does not say which blocks it repeats"),
    ],
)
def test_what_cannot_work_is_refused(backend, options, message):
    with pytest.raises(UserError, match=message):
        compile(toy(), backend=backend, options=options)


@torch.no_grad()
def test_jit_without_blocks_works_without_inductor():
    module = compile(toy(), options={"mode": "jit:disable-runtime-fusion"})
    assert record_of(module).backend == "aot_eager"
    torch.testing.assert_close(module(image()), toy()(image()))


def test_quant_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"needs torchao: pip install -e '.\[quant\]'"):
        compile(toy(), options={"mode": "quant"})


@pytest.mark.extra
@torch.no_grad()
def test_quant_with_torchao():
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    x, names = torch.randn(32, 64), list(model.state_dict())
    expected = model(x)
    with pytest.raises(UserError, match=r"no quant_type 'int8'. Types: fp8"):
        compile(model, backend="aot_eager", options={"mode": "quant", "quant_type": "int8"})
    with pytest.raises(UserError, match="has no linear layer of 512 features"):
        compile(model, backend="aot_eager", options={"mode": "quant", "quant_type": "int8_dynamic"})
    options = {"mode": "quant", "quant_type": "int8_dynamic", "quant_min_features": 64}
    compile(model, backend="aot_eager", options=options)
    got = model(x)
    assert list(model.state_dict()) == names
    assert not torch.equal(got, expected)
    assert (got - expected).square().mean() < 1e-3 * expected.square().mean()
    assert type(model[2].weight.data) is torch.Tensor  # 8 features are left alone


@pytest.mark.extra
@needs_compiler
@torch.no_grad()
def test_quantised_weights_are_frozen(frozen):
    pytest.importorskip("torchao")
    model, x = wide(64), torch.randn(8, 64)
    expected = model(x)
    compile(model, options={"mode": "quant:freezing", "quant_min_features": 64, "quant_type": "int8_weightonly"})
    assert (model(x) - expected).norm() < 0.05 * expected.norm()
    assert [kept for _, kept in frozen] == [1]


@pytest.fixture
def hopper(monkeypatch):
    """Weights may be quantised to fp8 here, as on an H100; products are not computed."""
    pytest.importorskip("torchao")
    import torchao.quantization.quant_api as quant_api

    monkeypatch.setattr(quantise, "takes_float8", lambda _: True)
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda *_, **__: None, raising=False)


def wide(features: int = 512) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, features), nn.GELU(), nn.Linear(features, features)).eval()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, "fp8_e4m3_e4m3_dynamic_per_tensor"),
        (torch.float16, "fp8_e4m3_e4m3_dynamic_per_tensor"),
        (torch.bfloat16, "fp8_e4m3_e4m3_dynamic"),
    ],
)
def test_quant_chooses_a_type_that_takes_the_weights(hopper, dtype, kind):
    model = wide().to(dtype)
    compile(model, backend="none", options={"mode": "quant"})
    assert all(map(quantise.is_quantised, (model[0], model[2])))
    weight = model[0].weight
    assert type(weight.data).__name__ == ("Float8Tensor")
    assert (weight.data.scale.numel() > 1) == (kind == "fp8_e4m3_e4m3_dynamic")  # by row
    compile(model, backend="none", options={"mode": "quant"})  # they are as they should be
    assert model[0].weight is weight


def test_a_type_that_does_not_take_the_weights_is_refused(hopper):
    model = wide()
    with pytest.raises(UserError, match=r"needs weights in bf16: .* use one of fp8_e4m3_e4m3_dynamic_per"):
        compile(model, backend="none", options={"mode": "quant", "quant_type": "fp8_e4m3_e4m3_dynamic"})
    assert not any(map(quantise.is_quantised, model))


@pytest.mark.extra
@torch.no_grad()
def test_compiling_quantised_weights_again(programs):
    pytest.importorskip("torchao")
    model, x = wide(64), torch.randn(4, 64)
    options = {"mode": "quant", "quant_min_features": 64, "quant_skip": ["2"]}
    compile(model, backend="counting", options=options)
    before, weight = model(x), model[0].weight
    compile(model, backend="counting", options={**options, "dynamic": True})
    assert model[0].weight is weight
    torch.testing.assert_close(model(x), before)
    assert record_of(model).options.dynamic is True
    with pytest.raises(UserError, match="quant_skip: '3' is not a layer"):
        compile(model, backend="counting", options={**options, "quant_skip": ["3"]})
    assert record_of(model).options.dynamic is True  # what is refused leaves the program of before
    assert model._compiled_call_impl is not None
    model[0].weight = nn.Parameter(torch.randn(64, 64))  # loaded anew
    compile(model, backend="counting", options={**options, "quant_type": "int8_weightonly"})
    assert quantise.is_quantised(model[0])


@pytest.mark.extra
@torch.no_grad()
def test_layers_that_are_named_are_left_alone():
    pytest.importorskip("torchao")
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).eval()
    options = {"mode": "quant", "quant_type": "int8_weightonly", "quant_min_features": 32, "quant_skip": ["1"]}
    with pytest.raises(UserError, match=r"quant_skip: 'first' is not a layer that would be quantised"):
        compile(model, backend="aot_eager", options={**options, "quant_skip": ["first"]})
    compile(model, backend="aot_eager", options=options)
    assert [quantise.is_quantised(layer) for layer in model] == [True, False, True]
