"""What Inductor leaves to do in the graphs of our blocks."""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

CONVERT = torch.ops.prims.convert_element_type.default
SHORT, WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
"""Each of the wide dtypes holds every value of each short one."""


class DropRoundTrips(CustomGraphPass):
    """Drops casts that change no bit: from a short dtype to a wide one and straight back, and to the dtype that is there.

    They come up where the gradient of an fp32 sum goes to a kernel that reads bf16. Inductor writes a copy for each: three passes over
    the tokens at the end of a block alone.
    """

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        for node in list(graph.nodes):
            source = node.args[0] if node.target is CONVERT else None
            if not isinstance(source, Node) or any(user.op == "output" for user in node.users):
                continue  # a result must not become an input in disguise
            first = source.args[0] if source.target is CONVERT else None
            if _dtype(source) is node.args[1]:
                node.replace_all_uses_with(source)
            elif isinstance(first, Node) and _dtype(first) is node.args[1] in SHORT and source.args[1] in WIDE:
                node.replace_all_uses_with(first)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Of this code, for the caches of compiled graphs."""
        return get_hash_for_files((__file__,))


DROP_ROUND_TRIPS = DropRoundTrips()
"""One for all blocks, which would share no program otherwise."""


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)
