"""OneDiff's interface to its nexfort compiler, over PyTorch's own: `compile`, `compile_pipe`, and saving what was compiled.

    from opensora.acceleration.compiler import compile, compile_pipe

    compile(module, backend="nexfort", options={"mode": "O3"})
    pipe = compile_pipe(pipe, backend="nexfort", options='{"mode": "O3", "memory_format": "channels_last"}')

nexfort itself is closed; its mode words are mapped to settings of inductor, see docs/how-to/compiler.md.
"""

from opensora.acceleration.compile.adapters import Adapters
from opensora.acceleration.compile.nexfort import compile, parse_options
from opensora.acceleration.compile.pipes import compile_pipe, quantize_pipe
from opensora.acceleration.compile.saved import load_compiled, load_pipe, save_compiled, save_pipe

__all__ = [
    "Adapters",
    "compile",
    "compile_pipe",
    "load_compiled",
    "load_pipe",
    "parse_options",
    "quantize_pipe",
    "save_compiled",
    "save_pipe",
]
