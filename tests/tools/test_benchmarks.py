"""The benchmarks run at toy size, say where and with what, and compare fast paths with slow ones in the same run."""

import re
from importlib import import_module

import pytest
import torch
from PIL import Image

from opensora.utils.errors import UserError
from tests.acceleration.compiler.toys import saved_pixart
from tests.tools.markdown import table_of
from tools.benchmark import profiling
from tools.benchmark.__main__ import BENCHMARKS, run
from tools.benchmark.measure import OUT_OF_MEMORY, Options, Table, attempt, psnr, relative_error

CPU = torch.device("cpu")
TINY = "--latent 1 4 4 --models DiT-S/2 --text-len 4 --peak-tflops 1"
# options after --toy, rows of all tables together, the column that compares, and what may stand there
RUNS: dict[str, tuple[str, int, str | None, float]] = {
    "train_step": (f"{TINY} --checkpoint none block", 2, "error", 1e-5),
    "train_step bf16": (f"{TINY} --dtype bf16", 1, "gradient error", 0.1),
    "sequence_parallel": ("--peak-tflops 1", 1, None, 0),
    "wan": ("--settings wan-5b-lora wan-5b-forward --ways ours diffusers-eager", 4, "error", 0.05),
    "attention": ("", 21, "error", 1e-5),
    "attention bf16": ("--dtype bf16 --cases text --kernels auto", 1, "of the gradient", 0.02),
    "nova": ("--cases t2v --peak-tflops 1", 2, None, 0),
    "sample": ("--steps 2", 2, None, 0),
    "step_cache": ("", 2, None, 0),
    "compile_modes": ("--model DiT-XL/2 --modes jit:freezing", 3, None, 0),
    "vae": ("--formats fp32 bf16 --size 16 16 --frames 1", 2, "error decode", 0.05),
    "text_encoder": ("--dtype fp32", 2, None, 0),
    "dataloader": ("--workers 0 1", 2, None, 0),
    "decode": ("--readers opensora", 1, None, 0),
    "checkpoint": ("", 3, None, 0),
    "table": ("--rows 2000", 22, None, 0),
    "footage": ("", 5, None, 0),
    "scoring": ("--clips 100", 2, None, 0),
}
LONG = ("wan", "table", "attention", "train_step", "train_step bf16", "sample", "compile_modes", "vae", "step_cache")
ELSEWHERE = {"goals": "test_goals_benchmark.py", "compile_cache": "below", "text_to_image": "below"}


@pytest.mark.usefixtures("without_code")
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in LONG else n for n in RUNS])
def test_a_benchmark_prints_its_table(name, capfd):
    options, lines, column, largest = RUNS[name]
    argv = [name.partition(" ")[0], "--toy", *options.split()]
    threads = torch.get_num_threads()
    run(argv)
    torch.set_num_threads(threads)
    printed = capfd.readouterr().out
    (head,) = (line for line in printed.splitlines() if line.startswith("`python -m "))
    assert head.startswith(f"`python -m tools.benchmark {' '.join(argv)}`, ")
    assert f"torch {torch.__version__}" in head
    assert re.search(r"\d{4}-\d\d-\d\d", head)
    rows = table_of(printed)
    assert len(rows) == lines
    assert all(any(re.search(r"\d", cell) for cell in list(row.values())[1:]) for row in rows)  # figures, no errors
    if column is not None:
        found = [float(row[column]) for row in rows]
        assert all(0 <= value < largest for value in found)
        assert "bf16" not in name or min(found) > 1e-5  # it is no fp32 that was compared


def test_every_benchmark_runs_in_a_test(capsys):
    assert {name.partition(" ")[0] for name in RUNS} | set(ELSEWHERE) == set(BENCHMARKS)
    run([])
    listed = capsys.readouterr().out
    for name, (module, about) in BENCHMARKS.items():
        assert f"  {name:<18} {about}\n" in listed
        assert callable(getattr(import_module(f"tools.benchmark.{module}"), name))
    with pytest.raises(UserError, match=r"'nothing' is no benchmark\. Choices: train_step, "):
        run(["nothing"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_saved_programs_are_found(capfd):
    run(["compile_cache", "--toy", "--model", "DiT-XL/2", "--mode", "jit"])
    first, loaded, same = table_of(capfd.readouterr().out)
    assert (first["programs found"], first["compiled"]) == ("0", "1")
    assert (loaded["programs found"], loaded["compiled"]) == (same["programs found"], same["compiled"]) == ("1", "0")
    assert float(loaded["against the first"]) < 0.01


@pytest.mark.slow
@pytest.mark.nightly
def test_a_step_cache_samples_something_else(capsys):
    """The column tells a way that computes something else from one that does not."""
    run(["sample", "--toy", *("--ways", "eager", "pab", "offload-model", "--steps", "8")])
    first, cached, same = (row["PSNR dB"] for row in table_of(capsys.readouterr().out))
    assert (first, same) == ("-", "equal")
    assert 10 < float(cached) < 100


def test_options_choose_their_defaults_by_the_size():
    for argv, steps in ((["--toy"], 2), (["--device", "cpu"], 2), (["--device", "cuda"], 20)):
        options = Options("name", None, argv)
        options.add("--steps", 20, 2)
        options.add("--models", ["a", "b"], ["c"])
        args = options.parse()
        assert (args.steps, args.toy) == (steps, steps == 2)
        assert args.models == (["c"] if steps == 2 else ["a", "b"])
    options = Options("name", None, [], device="cpu")
    options.add("--steps", 20, 2)
    assert options.parse().steps == 20


def test_rows_are_filled_up_and_numbers_formatted(capsys):
    table = Table({"way": "", "ms": ".1f", "share": ".0%"})
    table.row("fast", 12.34, 0.5)
    table.row("slow", None)
    table.row("large", OUT_OF_MEMORY)
    assert capsys.readouterr().out.splitlines() == [
        "| way | ms | share |", "|---|---|---|", "| fast | 12.3 | 50% |", "| slow | - | - |", "| large | out of memory | - |",
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_what_does_not_fit_is_a_row_and_not_the_end():
    def fail(error):
        raise error

    assert attempt(lambda: 3) == 3
    assert attempt(lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))) == OUT_OF_MEMORY
    assert attempt(lambda: fail(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")), RuntimeError) == OUT_OF_MEMORY
    assert (
        attempt(lambda: fail(RuntimeError("a kernel failed\nwith details")), Exception)
        == "RuntimeError: a kernel failed"
    )
    assert attempt(lambda: fail(UserError("needs a GPU\nsuch as")), UserError) == "needs a GPU"
    with pytest.raises(RuntimeError, match="a kernel failed"):
        attempt(lambda: fail(RuntimeError("a kernel failed")), UserError)


def test_errors():
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert psnr(exact + 0.4, exact) == pytest.approx(20)
    assert psnr(exact, exact) == float("inf")


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
    "ncclDevKernel_AllReduce": profiling.OTHER,
}  # as profilers print them on an H100, shortened


@pytest.mark.parametrize("name", KINDS)
def test_a_kernel_is_known_by_its_name(name):
    assert profiling.kind_of(name) == KINDS[name]


@pytest.mark.parametrize("module", ["short_attention", "head_norm"])
def test_our_triton_kernels_have_a_line_of_their_own(module):
    """By the names that Triton gives them, which are those of the functions."""
    pytest.importorskip("triton")
    kernels = import_module(f"opensora.acceleration.kernels.{module}")
    names = [
        name for name, value in vars(kernels).items() if type(value).__name__ == "JITFunction" and "ward_kernel" in name
    ]
    assert len(names) == 2
    assert {profiling.kind_of(name) for name in names} == {f"our {module}"}


def test_a_trace_gives_what_ran_on_the_gpu_and_how_long_it_was_busy():
    events = [
        {"cat": "kernel", "name": "a", "ts": 100, "dur": 10.5},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 90, "dur": 500},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 90, "dur": 500},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 105, "dur": 10},  # half of it during a
        {"cat": "kernel", "name": "a", "ts": 200, "dur": 5},
        {"name": "process_name", "ph": "M"},
    ]
    kernels = profiling.in_trace({"traceEvents": events})
    assert [kernel.name for kernel in kernels] == ["a", "Memcpy DtoD (Device -> Device)", "a"]
    assert profiling.busy_ms(kernels) == pytest.approx(0.020)
    assert profiling.busy_ms([]) == 0


@pytest.mark.slow
def test_the_profile_prints_both_tables(capsys):
    run(["train_step", "--toy", "--profile", "--peak-tflops", "1"])
    printed = capsys.readouterr().out
    _, *rows = table_of(printed)
    kinds = {row["kind"]: float(row["share"].rstrip("%")) for row in rows if "kind" in row}
    assert kinds.pop("all") == 100
    assert list(kinds) == [*profiling.KINDS, profiling.OTHER]
    assert sum(kinds.values()) == pytest.approx(100, abs=1)
    assert kinds["matrix products"] > 0
    assert kinds["attention (cuDNN, flash, efficient)"] > 0
    assert sum("kernel" in row for row in rows) == profiling.LARGEST
    assert "ms without the profiler, busy" in printed


@pytest.mark.slow
def test_onediffs_benchmark_runs_a_pipeline_of_diffusers_at_many_sizes(tmp_path, capfd):
    model = ["text_to_image", "--model", str(saved_pixart(tmp_path / "pixart")), "--device", "cpu", "--repeats", "1"]
    argv = [*model, "--steps", "2", "--height", "32", "--width", "48", "--scheduler"]
    image = ["--output-image", str(tmp_path / "first.png"), "--quantize", "--quantize-config", "null"]
    run(
        [
            *argv,
            "none",
            "--compiler",
            "none",
            "--run_multiple_resolutions",
            "True",
            "--run_rare_resolutions",
            "1",
            *image,
        ]
    )
    assert Image.open(tmp_path / "first.png").size == (48, 32)
    eager = table_of(capfd.readouterr().out)
    assert [row["size"] for row in eager] == ["32x48", "32x32", "16x48", "16x32", "48x96", "80x64", "112x80"]
    assert all(float(row["steps/s"]) * float(row["s"]) > 2 for row in eager)  # the loop is a part of the call
    assert {row["programs"] for row in eager} == {"0"}
    with pytest.raises(UserError, match="--scheduler Eular: diffusers has no such class"):
        run([*argv, "Eular"])
    with pytest.raises(UserError, match=r"pipeline: could not load .*nowhere"):
        run(["text_to_image", "--model", str(tmp_path / "nowhere")])


@pytest.mark.nightly
@pytest.mark.slow
def test_onediffs_benchmark_counts_programs(tmp_path, capfd):
    model = ["text_to_image", "--model", str(saved_pixart(tmp_path / "pixart")), "--device", "cpu", "--repeats", "1"]
    config = '{"mode": "max-optimize:max-autotune:low-precision", "memory_format": "channels_last", "dynamic": true}'
    compiler = ["--scheduler", "EulerDiscreteScheduler", "--compiler", "eager", "--compiler-config", config]
    run([*model, "--steps", "1", "--height", "16", "--width", "32", *compiler])
    (row,) = table_of(capfd.readouterr().out)
    assert int(row["programs"]) > 0
