"""What Inductor leaves to do in the graphs of our blocks."""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

CONVERT = torch.ops.prims.convert_element_type.default
SHORT, WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
"""Each of the wide formats holds every number of each short one."""


class DropRoundTrips(CustomGraphPass):
    """Drops casts that change no bit: from a short format to a wide one and straight back, and to the format that is there.

    They come up where the gradient of an fp32 sum goes to a kernel that reads bf16. Inductor writes a copy for each: three passes over
    the tokens at the end of a block alone.
    """

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        for node in list(graph.nodes):
            source = unchanged(node)
            # a result must not become an input in disguise
            if source is not None and all(user.op != "output" for user in node.users):
                node.replace_all_uses_with(source)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Of this code, for the caches of compiled graphs."""
        return get_hash_for_files((__file__,))


DROP_ROUND_TRIPS = DropRoundTrips()
"""One for all blocks, which would share no program otherwise."""


def unchanged(node: Node) -> Node | None:
    """What a cast gives again, bit by bit; None where it does not, or is none."""
    if node.target is not CONVERT or not isinstance(source := node.args[0], Node):
        return None
    if _format(source) is node.args[1]:
        return source
    if source.target is not CONVERT or not isinstance(first := source.args[0], Node):
        return None
    there_and_back = _format(first) in SHORT and source.args[1] in WIDE and _format(first) is node.args[1]
    return first if there_and_back else None


def _format(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
