"""NOVA's published weights, whose names are our own; they hold nothing that we compute."""

from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """Published or own weights -> own names. Tables of positions are computed anew; images need no motion tokens."""
    own = model.state_dict()
    dropped = {name: "computed for every size" for name in state if name.endswith(TABLES)}
    if not any(name.startswith(MOTION) for name in own):
        dropped |= {name: "this model has no motion tokens" for name in state if name.startswith(MOTION)}
    tensors = {name: tensor for name, tensor in state.items() if name not in dropped}
    initial = {}
    if not any(name.startswith(MOTION) for name in state):
        initial = {name: "the file has no motion tokens" for name in own if name.startswith(MOTION)}
    return Conversion(tensors, "NOVA", dropped=dropped, initial=initial)


MOTION = "motion_embed."
TABLES = ("pos_embed.space_embed", "pos_embed.time_embed", "pos_embed.weight", "rope.weight")
