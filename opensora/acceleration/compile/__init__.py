"""Compilation: blocks for training (`compile_blocks`), CUDA graphs, and OneDiff's interface for inference.

Users import the last one from `opensora.acceleration.compiler`.
"""

from opensora.acceleration.compile.blocks import compile_blocks

__all__ = ["compile_blocks"]
