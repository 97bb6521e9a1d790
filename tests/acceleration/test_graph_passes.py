"""Casts that change no bit, dropped from graphs."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compile.graph_passes import CONVERT, DropRoundTrips

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def traced(dtypes, first):
    """A graph that casts `first` to one dtype after another, with something behind it, and is changed."""

    def function(x):
        for each in dtypes:
            x = torch.ops.prims.convert_element_type(x, each)
        return torch.ops.aten.sin(x)

    graph = make_fx(function, tracing_mode="fake")(torch.zeros(3, dtype=first))
    DropRoundTrips()(graph.graph)
    graph.recompile()
    casts = [node.args[1] for node in graph.graph.nodes if node.target is CONVERT]
    values = torch.randn(3).to(first)
    assert torch.equal(graph(values), function(values))
    return casts


@pytest.mark.parametrize("short", [BF16, F16])
@pytest.mark.parametrize("wide", [F32, F64])
def test_there_and_back_is_dropped(short, wide):
    assert traced([wide, short], short) == []
    assert traced([wide, short, wide, short], short) == []


@pytest.mark.parametrize(
    ("dtypes", "first"),
    [
        ([BF16, F32], F32),
        ([F16, BF16], BF16),
        ([BF16, F16], F16),
        ([F64, BF16], F16),
        ([F32], BF16),
        ([F32, F64], BF16),
    ],
)
def test_casts_that_round_or_change_the_dtype_stay(dtypes, first):
    assert traced(dtypes, first) == dtypes


def test_a_cast_to_the_dtype_that_is_there_is_dropped():
    assert traced([F32], F32) == []
    assert traced([BF16, BF16, F32], F32) == [BF16, F32]


def test_a_result_does_not_become_an_input():
    graph = make_fx(lambda x: torch.ops.prims.convert_element_type(x, BF16), tracing_mode="fake")(
        torch.zeros(3, dtype=BF16)
    )
    DropRoundTrips()(graph.graph)
    assert [node.args[1] for node in graph.graph.nodes if node.target is CONVERT] == [BF16]


class Nothing(CustomGraphPass):
    """A pass of a user's own, which stays."""

    calls = 0

    def __call__(self, _graph):
        Nothing.calls += 1

    def uuid(self):
        return None


def taken():
    """Whether PyTorch hands the pass to Inductor: 2.6 and 2.8 do not, silently."""
    options = {"post_grad_custom_pre_pass": DropRoundTrips()}
    return "post_grad_custom_pre_pass" in torch._TorchCompileInductorWrapper("default", options, None).config


class There(torch.nn.Module):
    """A block with such casts between two products, in both directions."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(BF16))

    def forward(self, x):
        return ((x @ self.weight).float().to(BF16) @ self.weight).sin()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not taken(), reason="this PyTorch drops what may be None from a compilation's options")
def test_compiled_blocks_give_the_same_bits_with_and_without(monkeypatch):
    found, dropped = [], []
    call = DropRoundTrips.__call__

    def spy(self, graph):
        before = sum(node.target is CONVERT for node in graph.nodes)
        call(self, graph)
        dropped.append(before - sum(node.target is CONVERT for node in graph.nodes))

    monkeypatch.setattr(DropRoundTrips, "__call__", spy)
    for own in (None, Nothing()):
        torch._dynamo.reset()
        with config.patch(post_grad_custom_pre_pass=own, force_disable_caches=True):
            block, x = There(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
            compile_blocks([block])
            out = block(x)
            out.float().square().mean().backward()
        found.append([out.detach(), x.grad, block.weight.grad])
    assert sum(dropped) >= 2, "forward and backward"
    assert Nothing.calls == 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
