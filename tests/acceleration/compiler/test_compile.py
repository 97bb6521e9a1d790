"""`compile`: the seed's snippet, one program for many sizes, and the rules that hold while a program runs.

Most tests compile with "aot_eager" or a backend that counts programs, which need no C++ compiler; one uses inductor.
"""

import copy
import operator
import shutil
import sys

import pytest
import torch
from torch import nn

from opensora.acceleration.compile import module as module_file
from opensora.acceleration.compile import quantise
from opensora.acceleration.compile.blocks import repeated_blocks
from opensora.acceleration.compile.module import flags_of, record_of, restore, switched
from opensora.acceleration.compiler import compile, layer_errors, parse_options, worst
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
    assert not isinstance(again._compiled_call_impl.compiled, type(again._compiled_call_impl))
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
    assert len(programs) == 1
    with pytest.raises(UserError, match="double: quant is for modules"):
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
    module._compiled_call_impl.compiled = module._call_impl  # what follows is before and after the program
    with torch.no_grad():
        module(image())
        module(image())
        module.fc1.weight.mul_(2)
        with pytest.raises(UserError, match="its weights changed since"):
            module(image())
        restore(module)
        module.load_state_dict(module.state_dict())
    with pytest.raises(UserError, match="is in training mode"):
        compile(toy().train(), options={"mode": "freezing"})
    adapted = toy()
    adapted.fc1.lora_A = nn.Linear(8, 2)
    with pytest.raises(UserError, match="has an adapter"):
        compile(adapted, options={"mode": "freezing"})


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
    knows = module_file.knows
    monkeypatch.setattr(
        module_file, "knows", lambda argument: knows(argument) and (isolates or "isolate" not in argument)
    )
    module, x = toy(), image()
    compile(module, options={"mode": "freezing"})(x)
    restore(module)
    module.fc1.weight.mul_(2)
    expected = module(x)
    compile(module, options={"mode": "freezing"})
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


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
    assert len(record_of(model).calls()) == 1  # block by block each would be a program of its own
    torch.testing.assert_close(model(**cond), expected, atol=1e-4, rtol=1e-4)
    assert frozen
    assert all(kept < given for given, kept in frozen)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("aot_eager", {"regional": False}, 'would do nothing: leave out cudagraphs and "regional": false'),
        ("nexfort", {"mode": "cudagraphs"}, 'would do nothing: leave out cudagraphs and "regional": false'),
        ("nexfort", {"mode": "freezing"}, "leave freezing out"),
        ("nexfort", {"mode": "freezing", "regional": True}, "leave freezing out"),
    ],
)
@needs_compiler
@pytest.mark.filterwarnings("ignore:NOVA. cudagraphs has no effect without a GPU")
def test_a_model_whose_parts_are_called_is_compiled_by_blocks_or_not_at_all(backend, options, message):
    model = nova()
    with pytest.raises(UserError, match=message):
        compile(model, backend=backend, options=options)
    assert record_of(model) is None


@torch.no_grad()
def test_sampling_by_parts_runs_the_blocks_programs(programs):
    model = nova()
    compile(model, backend="counting")
    scheduler = SCHEDULERS.build({"type": "nova", "num_sampling_steps": 1, "num_diffusion_steps": 1, "cfg_scale": 1.0})
    scheduler.sample(model, torch.randn(1, 4, 1, 4, 4), {"y": torch.randn(1, 1, 4, 8)}, generators=[torch.Generator()])
    assert programs
    assert any(call.sizes for call in record_of(model).calls())


def nova() -> nn.Module:
    torch.manual_seed(0)
    return MODELS.build(
        {"type": "NOVA", "width": 32, "num_heads": 2, "video_depth": 1, "image_depth": 2, "head_depth": 1, "motion": False,
         "caption_channels": 8, "model_max_length": 4}
    ).eval()  # fmt: skip


def test_switches_are_set_while_it_runs_and_put_back():
    matmul, seen = torch.backends.cuda.matmul, []
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction

    class Looks(nn.Module):
        def forward(self, x):
            seen.append((matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction))
            return x

    module = Looks()
    compile(module, backend="aot_eager", options={"mode": "low-precision"})
    module._compiled_call_impl.compiled = module._call_impl
    module(torch.ones(1))
    assert seen == [(True, True)]
    assert (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction) == before


NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


@pytest.fixture
def _tf32():
    """Puts back what the process began with."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    if NEWER:
        torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def tf32() -> dict[str, object]:
    """Every setting of TF32, of either interface; what cannot be read is the error's name."""
    backends, names = torch.backends, ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]
    names += [
        f"{owner}.fp32_precision" for owner in ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")
    ]
    found: dict[str, object] = {}
    for name, read in {
        "older": torch.get_float32_matmul_precision,
        **{name: lambda name=name: operator.attrgetter(name)(backends) for name in names[: None if NEWER else 2]},
    }.items():
        try:
            found[name] = read()
        except RuntimeError as error:
            found[name] = type(error).__name__
    return found


@pytest.mark.usefixtures("_tf32")
@pytest.mark.parametrize(
    "options", [{"mode": "low-precision"}, {"overrides.matmul_allow_tf32": False}], ids=["on", "off"]
)
@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
        "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.backends.cudnn.allow_tf32 = False; torch.backends.cudnn.rnn.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    ],
)
def test_tf32_is_switched_whichever_of_pytorchs_interfaces_the_program_uses(program, options):
    if "fp32_precision" in program and not NEWER:
        pytest.skip("this PyTorch has no fp32_precision")
    exec(program)
    before, seen, flags = tf32(), {}, flags_of(parse_options(options))
    with switched(flags):
        seen = tf32()
    assert tf32() == before
    on = "mode" in options
    assert "RuntimeError" not in {seen["older"], seen["cuda.matmul.allow_tf32"]}
    assert seen["cuda.matmul.allow_tf32"] is on
    assert not on or seen["cudnn.allow_tf32"] is True
    if NEWER:
        assert (seen["cuda.matmul.fp32_precision"] == "tf32") is on
        assert not on or seen["mkldnn.matmul.fp32_precision"] == before["mkldnn.matmul.fp32_precision"]
        torch.backends.fp32_precision = "tf32"  # what followed it before follows it now
        if program == "pass":
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"


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
    assert len(record_of(transformer).calls()) == 2


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("nexfrt", {}, "no compiler backend 'nexfrt'. Did you mean 'nexfort'"),
        ("oneflow", {}, "no compiler backend 'oneflow'"),
        (
            "aot_eager",
            {"mode": "O3"},
            "cache-all, max-autotune, max-optimize would have no effect with backend 'aot_eager'",
        ),
        ("aot_eager", {"inductor.epilogue_fusion": False}, "inductor.epilogue_fusion would have no effect"),
        ("nexfort", {"mode": "jit:max-autotune"}, "max-autotune would have no effect"),
        ("aot_eager", {"regional": True}, "Toy does not say which blocks it repeats"),
    ],
)
def test_what_would_have_no_effect_is_refused(backend, options, message):
    with pytest.raises(UserError, match=message):
        compile(toy(), backend=backend, options=options)


@torch.no_grad()
def test_jit_without_blocks_works_without_inductor():
    module = compile(toy(), options={"mode": "jit:disable-runtime-fusion"})
    assert record_of(module).backend == "aot_eager"
    torch.testing.assert_close(module(image()), toy()(image()))


def test_a_cpu_without_a_compiler_is_told(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match='needs a C\\+\\+ compiler; install g\\+\\+, or use backend="aot_eager"'):
        compile(toy())


def test_quant_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"needs torchao: pip install -e '.\[quant\]'"):
        compile(toy(), options={"mode": "quant"})


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

    monkeypatch.setattr(quantise, "_capability", lambda layers: (9, 0) if list(layers) else (0, 0))
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
    assert quantise._DONE[model][0] == kind
    weight = model[0].weight
    compile(model, backend="none", options={"mode": "quant"})  # they are as they should be
    assert model[0].weight is weight


def test_a_type_that_does_not_take_the_weights_is_refused(hopper):
    model = wide()
    with pytest.raises(
        UserError, match=r"needs weights in bf16, and those of 0 are float32\. Use one of fp8_e4m3_e4m3_dynamic_per"
    ):
        compile(model, backend="none", options={"mode": "quant", "quant_type": "fp8_e4m3_e4m3_dynamic"})
    with pytest.raises(UserError, match="needs weights in bf16"):
        layer_errors(model, lambda: model(torch.ones(1, 512)), "fp8_e4m3_e4m3_dynamic")
    with pytest.raises(UserError, match="no quant_type 'int8'"):
        layer_errors(model, lambda: model(torch.ones(1, 512)), "int8")
    assert not any(map(quantise.is_quantised, model))


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
    with pytest.raises(UserError, match=r"quantised already, with .*'int8_dynamic', .*=64 and quant_skip=\['2'\]"):
        compile(model, backend="counting", options={**options, "quant_type": "int8_weightonly"})
    assert record_of(model).options.dynamic is True  # what is refused leaves the program of before
    assert model._compiled_call_impl is not None
    model[0].weight = nn.Parameter(torch.randn(64, 64))  # loaded anew
    compile(model, backend="counting", options={**options, "quant_type": "int8_weightonly"})
    assert quantise.is_quantised(model[0])


@torch.no_grad()
def test_the_layers_that_quantisation_harms_most_are_found_and_left_alone():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).eval()
    model[1].weight[:, 0] *= 1000  # one large value in each row, beside which int8 loses the others
    model[0].weight[0] = 0
    model[0].bias[0] = 0
    x, names = torch.randn(16, 32), list(model.state_dict())
    expected = model(x)
    errors = layer_errors(model, lambda: model(x), "int8_weightonly", 32)
    assert torch.equal(model(x), expected)
    assert list(errors) == ["0", "1", "2", "3"]
    assert worst(errors, 0.75) == ["1"]
    assert worst(errors, 1.0) == []
    options = {"mode": "quant", "quant_type": "int8_weightonly", "quant_min_features": 32, "quant_skip": ["1"]}
    with pytest.raises(UserError, match=r"quant_skip: 'first' is no layer that would be quantised"):
        compile(model, backend="aot_eager", options={**options, "quant_skip": ["first"]})
    compile(model, backend="aot_eager", options=options)
    assert [type(layer.weight.data) is torch.Tensor for layer in model] == [False, True, False, False]
    assert list(model.state_dict()) == names
    assert (model(x) - expected).norm() < errors["1"] * expected.norm()
