"""The benchmark of the goals: its rivals compute what they stand for, its rows are complete; kernels in a profile get their kind."""

import sys

import pytest
import torch
from diffusers import DiTTransformer2DModel, LatteTransformer3DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from tools.benchmark import goals, step_profile
from tools.benchmark.exact import errors_of, exact
from tools.benchmark.rivals import RoundedWeights, diffusers_like, like_the_reference
from tools.benchmark.train_step import build, inputs

CPU = torch.device("cpu")
MODELS = {"STDiT-XL/2": (3, 5, 4), "STDiT3-XL/2": (3, 5, 4), "DiT-XL/2": (1, 4, 4)}  # latents


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_the_same_function_in_another_order(name):
    ours, theirs = (build(name, CPU, 6, **goals.TOY) for _ in range(2))
    like_the_reference(theirs)
    z, t, cond = inputs(ours, 2, MODELS[name], CPU)
    gradients = []
    for model in (ours, theirs):
        out = model(z, t, **cond)
        gradients.append(torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(theirs(z, t, **cond), ours(z, t, **cond), rtol=1e-5, atol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4 * float(one.abs().max()) if one is not None else 0)


def test_rounded_weights_learn_by_their_fp32_masters():
    """Against PyTorch's own clipping and AdamW on the masters; steps of 1e-5 are too small for bf16 weights near 1."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    masters = [nn.Parameter(weight.detach().clone()) for weight in layer.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    engine = RoundedWeights(layer, autocast=False, grad_clip=0.1)
    for _ in range(3):
        x = torch.randn(4, 8, dtype=torch.bfloat16)
        with engine.micro_step(last=True):
            loss = engine.model(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        rounded = [master.detach().bfloat16().requires_grad_() for master in masters]
        grads = torch.autograd.grad(nn.functional.linear(x, *rounded).float().square().mean(), rounded)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        assert float(nn.utils.clip_grad_norm_(masters, 0.1)) > 0.1  # it clips
        optimizer.step()
    for found, master, weight in zip(engine.masters, masters, layer.parameters(), strict=True):
        torch.testing.assert_close(found, master, rtol=0, atol=1e-8)
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, found.bfloat16())
        assert weight.grad is None


@pytest.mark.parametrize("name", MODELS)
def test_diffusers_model_has_the_nearest_flops_and_our_sizes(name):
    latent, text_len = MODELS[name], 6
    ours = build(name, CPU, text_len, **goals.TOY)
    model, _ = diffusers_like(ours, latent)
    assert type(model.theirs) is (DiTTransformer2DModel if latent[0] == 1 else LatteTransformer3DModel)
    z, t, cond = inputs(ours, 2, latent, CPU)
    with torch.no_grad():
        assert model(z, t, **cond).shape == ours(z, t, **cond).shape
    with torch.device("meta"):  # where attention is matrix products, which are counted
        model, flops = diffusers_like(ours, latent)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(z.to("meta"), t.to("meta"), cond["y"].to("meta"))
    assert counter.get_total_flops() == 2 * flops
    layers = model.theirs.config.num_layers
    wanted = ours.flops(latent, text_len)
    assert 0.6 < flops / wanted < 1.5
    assert (
        abs(flops - wanted) <= (flops / layers) / 2 + flops / 10
    )  # no other number of layers is nearer; embedders besides


@pytest.mark.nightly
@pytest.mark.slow
def test_the_table_has_a_row_for_each_way(monkeypatch, capsys):
    options = "--device cpu --settings stdit-16x256 dit-256 --ways reference --peak-tflops 1"
    monkeypatch.setattr(sys, "argv", ["tool", *options.split()])
    goals.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert tuple(rows[0]) == goals.COLUMNS
    assert all(len(row) == len(goals.COLUMNS) for row in (*rows[:1], *rows[2:]))
    found = [dict(zip(goals.COLUMNS, row, strict=True)) for row in rows[2:]]
    assert [(row["setting"], row["way"]) for row in found] == [
        (setting, "reference") for setting in ("stdit-16x256", "dit-256")
    ]
    for row in found:
        assert row["of the reference"] == "1.00"
        assert 1e-5 < float(row["error"]) < 0.05  # it is bf16, and nothing worse
        assert float(row["samples/s"]) == float(row["at equal FLOPs"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("setting", ["stdit-16x256", "dit-256"])
def test_compiled_ways_compute_what_they_should(setting, monkeypatch, capsys):
    """Inductor's part is run on GPUs; here it would take a minute a setting."""
    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: compile_block(self, fullgraph=True, backend="aot_eager")
    )
    options = f"--device cpu --settings {setting} --ways ours diffusers --checkpoint every:2 --peak-tflops 1"
    monkeypatch.setattr(sys, "argv", ["tool", *options.split()])
    goals.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {setting}")]
    ours, theirs = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    assert ours[:3] == [setting, "ours", "every:2"]
    assert 1e-5 < float(ours[goals.COLUMNS.index("error")]) < 0.05
    assert theirs[:3] == [setting, "diffusers", "block"]
    assert float(theirs[goals.COLUMNS.index("ms/step")]) > 0


@pytest.mark.slow
def test_what_does_not_fit_is_a_row_and_not_the_end():
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken():
        raise RuntimeError("a kernel failed\nwith details")

    assert goals.attempt(too_large, CPU) == goals.OUT_OF_MEMORY
    assert goals.attempt(broken, CPU) == "RuntimeError: a kernel failed"
    assert goals.attempt(lambda: 3, CPU) == 3


def test_each_way_tries_the_checkpointing_that_it_has():
    levels = ("none", "every:2", "block")
    assert goals.levels_of("ours", levels) == levels
    assert goals.levels_of("reference", levels) == ("block",)
    assert goals.levels_of("diffusers", levels) == ("none", "block")
    assert goals.levels_of("diffusers-autocast", levels[1:]) == ("block",)


KINDS = {
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT": "matrix products",
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>": "matrix products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x96": "attention (cuDNN, flash, efficient)",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 64, 64, 4>>": "attention (cuDNN, flash, efficient)",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention (cuDNN, flash, efficient)",
    "triton_poi_fused__to_copy_3": "copies, casts, transposes",
    "triton_poi_fused_clone_transpose_12": "copies, casts, transposes",
    "triton_poi_fused__to_copy_add_mul_7": "fused by Inductor, pointwise",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_gelu_7": "fused by Inductor, pointwise",
    "triton_red_fused_add_native_layer_norm_native_layer_norm_backward_sum_9": "fused by Inductor, reductions",
    "triton_per_fused_native_layer_norm_0": "fused by Inductor, reductions",
    "Memcpy DtoD (Device -> Device)": "copies, casts, transposes",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "copies, casts, transposes",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "eager pointwise and reductions",
    "void at::native::multi_tensor_apply_kernel<..., at::native::FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<..., at::native::LpNormFunctor<float, float>>": "norm clipping",
    "ncclDevKernel_AllReduce": step_profile.OTHER,
}  # as profilers print them on an H100, shortened


@pytest.mark.parametrize("name", KINDS)
def test_a_kernel_is_known_by_its_name(name):
    assert step_profile.kind_of(name) == KINDS[name]


@pytest.mark.parametrize("module", ["short_attention", "head_norm"])
def test_our_triton_kernels_have_a_line_of_their_own(module):
    """By the names that Triton gives them, which are those of the functions."""
    kernels = pytest.importorskip(f"opensora.acceleration.kernels.{module}")
    names = [
        name for name, value in vars(kernels).items() if type(value).__name__ == "JITFunction" and "ward_kernel" in name
    ]
    assert len(names) == 2
    assert {step_profile.kind_of(name) for name in names} == {f"our {module}"}


def test_a_trace_gives_what_ran_on_the_gpu_and_how_long_it_was_busy():
    events = [
        {"cat": "kernel", "name": "a", "ts": 100, "dur": 10.5},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 90, "dur": 500},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 90, "dur": 500},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 105, "dur": 10},  # half of it beside a
        {"cat": "kernel", "name": "a", "ts": 200, "dur": 5},
        {"name": "process_name", "ph": "M"},
    ]
    kernels = step_profile.in_trace({"traceEvents": events})
    assert [kernel.name for kernel in kernels] == ["a", "Memcpy DtoD (Device -> Device)", "a"]
    assert step_profile.busy_ms(kernels) == pytest.approx(0.020)
    assert step_profile.busy_ms([]) == 0


def test_the_profile_prints_both_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tool", "--device", "cpu", "--warmup", "1", "--steps", "1", "--profiled", "1"])
    step_profile.main()
    out = capsys.readouterr().out
    shares = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 4 and cells[2].endswith("%"):
            shares[cells[0]] = float(cells[2].rstrip("%"))
    kinds = [*step_profile.KINDS, step_profile.OTHER]
    assert sum(shares[kind] for kind in kinds) == pytest.approx(100, abs=1)
    assert shares["matrix products"] > 0
    assert shares["attention (cuDNN, flash, efficient)"] > 0
    assert sum(name.startswith("`") for name in shares) == step_profile.LARGEST
    assert "ms without the profiler, busy" in out


def test_a_gradient_that_is_lost_shows():
    model, other = (build("STDiT-XL/2", CPU, 6, **goals.TOY) for _ in range(2))
    z, t, cond = inputs(model, 2, MODELS["STDiT-XL/2"], CPU)
    right = exact(other, z, t, cond)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = build_engine("ddp", model, optimizer, World(0, 1, CPU), dtype="fp32")
    errors = errors_of(engine, z, t, cond, right)
    assert errors.prediction < 1e-6
    assert errors.gradient < 1e-5
    assert all(weight.grad is None for weight in model.parameters())
    block = model.transformer_blocks()[0]
    block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    errors = errors_of(engine, z, t, cond, right)
    assert errors.prediction < 1e-6
    assert errors.gradient > 1e-3
