"""Our Triton kernels are translated for a Hopper GPU, which takes none: mistakes that its interpreter lets pass, and memory on the chip.

At the sizes of an XL model: 16 heads of 72 channels, 1152 channels, bf16.
"""

import importlib.util
import inspect
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("this PyTorch has no Triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opensora.acceleration import few_keys_attention, fused_adaln, gelu_linear, short_attention

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that a program may take there
WIDE = ("lse_ptr", "mean_ptr", "rstd_ptr", "sums_ptr", "shifts_ptr", "scales_ptr", "gates_ptr")
"""Pointers to fp32; the others are to bf16, or to what a case says."""

SHORT = {"BLOCK_N": 16, "BLOCK_D": 128}
CASES: dict[str, tuple[Any, dict[str, int], dict[str, int], dict[str, str]]] = {
    "short forward": (short_attention._short_attention_forward_kernel, SHORT, {"num_warps": 1}, {}),
    "short backward": (short_attention._short_attention_backward_kernel, SHORT, {"num_warps": 1}, {}),
    "gelu": (
        gelu_linear._gelu_backward_kernel,
        {"ROWS": gelu_linear.ROWS, "BLOCK_ROWS": gelu_linear._BLOCK_ROWS, "COLUMNS": gelu_linear.COLUMNS},
        {"num_warps": gelu_linear._WARPS},
        {},
    ),
    "norm": (
        fused_adaln._norm_modulate_backward_kernel,
        {"ROWS": fused_adaln.ROWS, "BLOCK_ROWS": fused_adaln._NORM_ROWS, "CHANNELS": 2048},
        {"num_warps": fused_adaln._NORM_WARPS},
        {"scale_ptr": "*fp32"},
    ),
    "gate": (
        fused_adaln._gate_backward_kernel,
        {"ROWS": fused_adaln.ROWS, "BLOCK_ROWS": fused_adaln._GATE_ROWS, "COLUMNS": fused_adaln.COLUMNS},
        {"num_warps": fused_adaln._GATE_WARPS},
        {"gate_ptr": "*fp32"},
    ),
}
FEW = {"mask_ptr": "*i1", "dk_ptr": "*fp32", "dv_ptr": "*fp32"}
SIZES = {"d": 72, "ALIGN": 8, "BLOCK_K": 128, "BLOCK_D": 128, **few_keys_attention._BLOCK}
CASES |= {
    "few keys forward": (few_keys_attention._few_keys_forward_kernel, SIZES, few_keys_attention._FORWARD, FEW),
    "few keys backward": (few_keys_attention._few_keys_backward_kernel, SIZES, few_keys_attention._BACKWARD, FEW),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_becomes_a_program(case):
    kernel, constants, options, formats = CASES[case]

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return formats.get(name, "*fp32" if name in WIDE else "*bf16")
        return "fp32" if name == "scale" else "i32"

    signature = {name: kind(name) for name in inspect.signature(kernel.fn).parameters}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_BYTES


def test_every_kernel_is_here():
    modules = (few_keys_attention, fused_adaln, gelu_linear, short_attention)
    kernels = {
        value.fn.__qualname__
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    assert kernels == {kernel.fn.__qualname__ for kernel, *_ in CASES.values()}
