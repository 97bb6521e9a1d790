"""NOVA's published weights, whose names are our own; they hold nothing that we compute."""

from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """Published or own weights -> own names. Tables of positions are computed anew; images need no motion tokens."""
    own = model.state_dict()
    tensors = {name: tensor for name, tensor in state.items() if not name.endswith(TABLES)}
    dropped = {name: "computed for every size" for name in state if name.endswith(TABLES)}
    initial = {}
    if not any(name.startswith("motion_embed.") for name in tensors):
        initial = {name: "the file has no motion tokens" for name in own if name.startswith("motion_embed.")}
    return Conversion(tensors, "NOVA", dropped=dropped, initial=initial)


TABLES = ("pos_embed.space_embed", "pos_embed.time_embed", "pos_embed.weight", "rope.weight")
