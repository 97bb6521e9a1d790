"""What our autograd functions must not do, as a version of PyTorch that may be installed gets it wrong."""

import ast
from pathlib import Path

import pytest

import opensora

ROOT = Path(opensora.__file__).parent


def forwards(tree: ast.AST) -> list[ast.FunctionDef]:
    """`forward` of every class that derives from `torch.autograd.Function`."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ours = [node for node in classes if any("autograd.Function" in ast.unparse(base) for base in node.bases)]
    return [item for node in ours for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"]


def cast_results(forward: ast.FunctionDef) -> list[str]:
    """Results that are `tensor.to(...)`, which is the tensor itself where nothing changes."""
    returns = [node.value for node in ast.walk(forward) if isinstance(node, ast.Return) and node.value]
    results = [each for value in returns for each in (value.elts if isinstance(value, ast.Tuple) else [value])]
    casts = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}
    return [
        ast.unparse(each)
        for each in results
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in casts
    ]


@pytest.mark.slow
def test_no_result_is_a_cast_that_may_change_nothing():
    # compiled by PyTorch 2.11, such a result gets no gradient, without any error: tests/test_gpu.py::test_adaln_equals_pytorchs
    found = {
        f"{path.relative_to(ROOT)}: {result}"
        for path in ROOT.rglob("*.py")
        for forward in forwards(ast.parse(path.read_text()))
        for result in cast_results(forward)
    }
    assert not found


def test_the_search_finds_one():
    code = "class F(torch.autograd.Function):\n  def forward(ctx, x):\n    return x, (x * 2).to(x.dtype)"
    (forward,) = forwards(ast.parse(code))
    assert cast_results(forward) == ["(x * 2).to(x.dtype)"]
