"""Blocks that are compiled one by one; see tests/models/test_denoisers.py for their programs."""

import torch
from torch import Tensor, nn

from opensora.acceleration.compile import compile_blocks

KINDS = 12


class Kinds(nn.Module):
    """Needs a program for each kind."""

    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x * len(kind)


def test_more_programs_than_pytorch_allows_by_itself():
    torch._dynamo.reset()
    programs = []

    def backend(graph, _):
        programs.append(graph)
        return graph.forward

    blocks = [Kinds(), Kinds()]
    compile_blocks(blocks, backend=backend)
    for n in range(KINDS):
        for block in blocks:
            assert torch.equal(block(torch.ones(2), "x" * n), torch.full((2,), float(n)))
    assert len(programs) == KINDS
