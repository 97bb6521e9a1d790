"""Sequence parallelism: several processes shard the tokens of a sample, and no model knows of it.

`parallelise(model, group)` is all that a program calls. See docs/sequence-parallelism.md.
"""

from opensora.acceleration.sequence_parallel.apply import Method, check_sequence_parallel, parallelise

__all__ = ["Method", "check_sequence_parallel", "parallelise"]
