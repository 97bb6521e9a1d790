"""Our Triton kernels are translated for a Hopper GPU, which takes none: mistakes that its interpreter lets pass, memory on the chip, and
how much is read at a time.

At the sizes of an XL model: 16 heads of 72 channels, 1152 channels, bf16.
"""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("this PyTorch has no Triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import opensora.acceleration.kernels
from opensora.acceleration.kernels import adaln, head_norm, short_attention

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that a program may take there
WIDE = tuple(f"{name}_ptr" for name in ["mean", "rstd", "shifts", "scales", "gates", "weight", "weights", "table"])
"""Pointers to fp32; the others are to bf16, or to what a case says."""
EVEN = ("C", "group_rows", "num_rows")
"""Numbers of which Triton sees that 16 divides them, as it does of each pointer. It does not of the distance between heads of 72 channels."""

SHORT = {"d": 72, "ALIGN": 8, "BLOCK_N": 16, "BLOCK_D": 128}
CASES: dict[str, tuple[Any, dict[str, int], dict[str, int], dict[str, str]]] = {
    "short forward": (short_attention._short_attention_forward_kernel, SHORT, {"num_warps": 1}, {}),
    "short backward": (short_attention._short_attention_backward_kernel, SHORT, {"num_warps": 1}, {}),
    "64 frames backward": (
        short_attention._short_attention_backward_kernel,
        {**SHORT, "BLOCK_N": 64},
        {"num_warps": 4},
        {},
    ),
    "norm": (
        adaln._norm_modulate_backward_kernel,
        {"ROWS": adaln.ROWS, "BLOCK_ROWS": adaln._NORM_ROWS, "CHANNELS": 2048},
        {"num_warps": adaln._NORM_WARPS},
        {"scale_ptr": "*fp32"},
    ),
    "gate": (
        adaln._gate_backward_kernel,
        {"ROWS": adaln.ROWS, "BLOCK_ROWS": adaln._GATE_ROWS, "COLUMNS": adaln.COLUMNS},
        {"num_warps": adaln._GATE_WARPS},
        {"gate_ptr": "*fp32"},
    ),
}
NORM = {"H": 16, "d": 72, "ALIGN": 8, "CHANNELS": 128, "ROTATE": True}
FORWARD, BACKWARD = head_norm._FORWARD, head_norm._BACKWARD
CASES |= {
    "heads forward": (
        head_norm._norm_heads_forward_kernel,
        {**NORM, "BLOCK": FORWARD["BLOCK"]},
        {"num_warps": FORWARD["num_warps"]},
        {},
    ),
    "heads backward": (
        head_norm._norm_heads_backward_kernel,
        {**NORM, "STEPS": head_norm._STEPS, "BLOCK": BACKWARD["BLOCK"]},
        {"num_warps": BACKWARD["num_warps"]},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_becomes_a_program(case):
    kernel, constants, options, formats = CASES[case]

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return formats.get(name, "*fp32" if name in WIDE else "*bf16")
        return "fp32" if name in ("scale", "eps") else "i32"

    signature = {name: kind(name) for name in inspect.signature(kernel.fn).parameters}
    even = [i for i, name in enumerate(signature) if name.endswith("_ptr") or name in EVEN]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, divided_by_16(even)), target=HOPPER, options=options
    )
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_BYTES
    accesses = re.findall(r"(?:ld|st)\.global[.\w:]*", compiled.asm["ptx"])
    assert any(".v4.b32" in access for access in accesses)
    assert not [access for access in accesses if access.endswith(".b16")], (
        "activations are read or written one at a time"
    )


def divided_by_16(parameters: list[int]) -> Any:
    """What Triton knows of them."""
    of_triton_3_2 = getattr(triton.backends.compiler, "AttrsDescriptor", None)
    if of_triton_3_2 is not None:
        return of_triton_3_2.from_hints(dict.fromkeys(parameters, 16))
    return {(i,): [["tt.divisibility", 16]] for i in parameters}


def test_every_kernel_is_here():
    files = Path(opensora.acceleration.kernels.__path__[0]).glob("*.py")
    modules = [
        importlib.import_module(f"opensora.acceleration.kernels.{f.stem}")
        for f in files
        if "@triton.jit" in f.read_text()
    ]
    kernels = {
        value.fn.__qualname__
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    assert kernels == {kernel.fn.__qualname__ for kernel, *_ in CASES.values()}
