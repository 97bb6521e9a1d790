"""Triton kernels on the CPU, interpreted in this process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch


@contextmanager
def interpreted(module: ModuleType, **smaller: Any) -> Iterator[None]:
    """Triton interprets the kernels of a module, with `smaller` constants, so that a few rows already cross their borders.

    The interpreter's time goes by programs and by turns of their loops, hardly by how much is computed in one.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, mangle_type

    class Called(InterpretedFunction):
        """From a kernel. Triton's own patches its whole language again at every call, which takes nearly all of the time."""

        rewritten_fn: ClassVar[dict] = {}  # they need names that are in a module only until the end

        def __call__(self, *args: Any, **settings: Any) -> Any:
            return self.rewrite()(*args, **settings)

    mangle_type(0)  # what Triton imports at its first use has to find the language as it is
    with ExitStack() as stack:
        for place in (tl, tl.standard, module):
            functions = {
                name: Called(value.fn) for name, value in vars(place).items() if isinstance(value, JITFunction)
            }
            stack.enter_context(patch.dict(vars(place), functions))
        # what a kernel's module names `tl` and `core` is patched where a kernel is launched; functions of Triton's use the latter
        vars(module).update(smaller, core=tl.core)
        yield
