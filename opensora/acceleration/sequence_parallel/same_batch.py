"""The processes that share a sample must be given the same one; otherwise nothing fails, and nothing is learnt."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.sequence_parallel.collectives import Ranks, process_group
from opensora.utils.errors import UserError

PERIOD = 8191
"""Of the weights of the checksum, which make it see the order of the elements."""


def check_first_batch(model: nn.Module, ranks: Ranks) -> None:
    """Compare the inputs of the model's next call over the processes, once.

    The call raises UserError in all of them if they differ.
    """

    def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        refuse_different({name: value for name, value in named.items() if isinstance(value, Tensor)}, ranks)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def refuse_different(tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """See that all processes of the group have the same tensors, by a checksum of each.

    Raises:
        UserError: they have not; says which.
    """
    mine = {name: checksum(tensor) for name, tensor in tensors.items()}
    all_of_them: list[dict[str, Any]] = [{} for _ in range(ranks.size)]
    dist.all_gather_object(all_of_them, mine, group=process_group(ranks))
    names = sorted({name for each in all_of_them for name in each})
    different = [name for name in names if any(each.get(name) != all_of_them[0].get(name) for each in all_of_them)]
    if different:
        raise UserError(
            f"the {ranks.size} processes that share a sample were given different {', '.join(different)}. Data must be "
            "chosen by the data-parallel rank (World.dp_rank) and noise by the sample's place, never by the process."
        )


def checksum(tensor: Tensor) -> tuple[tuple[int, ...], float, float]:
    """Shape, sum, and sum with weights; the same tensor gives the same three on devices of one kind."""
    flat = tensor.detach().flatten().double().nan_to_num()
    weights = torch.arange(len(flat), device=flat.device) % PERIOD + 1
    return tuple(tensor.shape), float(flat.sum()), float((flat * weights).sum())
