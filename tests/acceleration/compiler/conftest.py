"""A backend that counts programs."""

import pytest
import torch


@pytest.fixture
def programs(monkeypatch):
    """The number of programs that the backend "counting" was asked for, as a list of that length."""
    torch._dynamo.reset()
    made: list[int] = []

    def counting(graph, example_inputs):
        made.append(len(example_inputs))
        return graph.forward

    counting._tags = ()  # what older PyTorch asks every backend for

    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "counting", None)
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "counting", counting)
    return made


@pytest.fixture(autouse=True)
def _precision():
    """Modes with low-precision set it for the process."""
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
