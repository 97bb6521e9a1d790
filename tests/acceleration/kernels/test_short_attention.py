"""The Triton kernel for short sequences, run on the CPU by Triton's own interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util

import pytest
import torch

from tests.acceleration.kernels.interpreter import interpreted
from tests.acceleration.kernels.short_attention_checks import SIZES, compare

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


@pytest.mark.parametrize("size", SIZES)
def test_output_and_gradients_equal_the_formula_in_the_interpreter(size):
    from opensora.acceleration.kernels import short_attention

    with interpreted(short_attention):
        compare(size, "cpu", torch.float32, 1e-5)


@pytest.mark.slow
def test_what_torch_compile_assumes_about_the_operators():
    from opensora.acceleration.kernels import short_attention as ops

    B, S, H, N, d = SIZES[0]
    tokens = torch.randn(B, N, S, 3 * H * d)
    q, k, v = tokens.unflatten(-1, (3, H, d)).permute(3, 0, 2, 4, 1, 5).unbind(0)
    with interpreted(ops):
        torch.library.opcheck(ops.short_attention, (q, k, v))
        torch.library.opcheck(ops.short_attention_backward, (q, q, k, v))
        torch.library.opcheck(ops.short_attention_packed, (tokens.clone().requires_grad_(), H))
        torch.library.opcheck(ops.short_attention_packed_backward, (tokens[..., : H * d].contiguous(), tokens, H))
