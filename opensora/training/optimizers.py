"""The optimizers of the config's `optimizer` besides AdamW: most weights take theirs, the others AdamW, behind one interface.

Outside of a step all state is plain tensors that lie as the weights do, so that engines shard and checkpoints store it as AdamW's.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opensora.utils.errors import UserError

BLOCK = 128  # elements that share a scale: a divisor of most models' widths, so that blocks end where rows do
MIN_8BIT_SIZE = 4096  # as bitsandbytes and torchao have it
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # -> whether it is signed
STACKED = {"qkv": 3, "kv_linear": 2}  # layer -> the matrices that its weight stacks


class ChainedOptimizer(Optimizer):
    """Several optimizers, each with weights of its own, as one: their param groups, and one `state` that they share."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of each."""
        for optimizer in self.optimizers:
            optimizer.step()


def check_optimizer(name: str) -> None:
    """Refuse an optimizer whose package is missing or too old, before anything is loaded.

    Raises:
        UserError: there is no torchao, or no Muon in this PyTorch.
    """
    if name == "adamw8bit":
        try:
            import torchao.optim  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"optimizer='adamw8bit' needs torchao ({error}): pip install -e '.[quant]', or use --optimizer adamw."
            ) from error
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"optimizer='muon' needs torch >= 2.9, and this is {torch.__version__}: upgrade it, or use --optimizer adamw."
        )


def adamw_8bit(weights: Iterable[Tensor], **settings: Any) -> Optimizer | None:
    """torchao's AdamW8bit (Dettmers et al. 2022, arXiv:2110.02861) over those of `weights` that it suits; None = there are none.

    These have at least `MIN_8BIT_SIZE` elements and rows of whole blocks, so that a shard of rows has its own scales. State of a
    weight [N, ...]: the codes `exp_avg` and `exp_avg_sq`, uint8 [N, ...], and their scales `exp_avg_scale` and `exp_avg_sq_scale`,
    fp32 [N, elements of a row / `BLOCK`].

    Args:
        weights: fp32.
        settings: of AdamW.
    """
    from torchao.optim import AdamW8bit

    suited = [w for w in weights if w.ndim > 1 and w.numel() >= MIN_8BIT_SIZE and not w.shape[1:].numel() % BLOCK]
    if not suited:
        return None
    optimizer = AdamW8bit(suited, **settings)
    optimizer.register_step_pre_hook(_to_torchao)
    optimizer.register_step_post_hook(_to_plain)
    return optimizer


def muon(model: nn.Module, lr: float, weight_decay: float) -> Optimizer | None:
    """torch.optim.Muon over the weights of the linear layers in `model.transformer_blocks()`; None = none of them is trained.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) with the update's size of Liu et al. 2025 (arXiv:2502.16982, eq. 4), so
    that AdamW's `lr` and `weight_decay` serve. Layers of modulation are left out. Of a layer that computes queries, keys and
    values at once, each of them is a matrix of its own. State of a weight: `momentum_buffer`, of its shape.
    """
    groups: dict[int, dict[str, Any]] = {}
    for block in model.transformer_blocks():  # type: ignore[operator]
        for name, layer in block.named_modules():
            trained = isinstance(layer, nn.Linear) and layer.weight.requires_grad
            if trained and not re.search("norm|modulation", name):
                parts = STACKED.get(name.rpartition(".")[2], 1)
                groups.setdefault(parts, {"params": [], "parts": parts})["params"].append(layer.weight)
    if not groups:
        return None
    optimizer = torch.optim.Muon([*groups.values()], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    optimizer.register_step_pre_hook(_split)
    optimizer.register_step_post_hook(_join)
    return optimizer


def _to_torchao(optimizer: Optimizer, *_: Any) -> None:
    """Before a step of `adamw_8bit`: codes and scales as torchao's tensors, in the same memory."""
    from torchao.optim.subclass_8bit import OptimState8bit

    for weight in _with_gradient(optimizer):
        state = optimizer.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            for key in MOMENTS:
                state[key] = torch.zeros_like(weight, dtype=torch.uint8)
                state[f"{key}_scale"] = weight.new_zeros(len(weight), weight.shape[1:].numel() // BLOCK)
        if not weight.numel():  # this process has no rows of it, and torchao cannot step on none
            weight.grad = None
            state["step"] += 1
            continue
        for key, signed in MOMENTS.items():
            table = _code_values(weight.device, signed)
            state[key] = OptimState8bit(state[key], state[f"{key}_scale"].view(-1), table, signed)


def _to_plain(optimizer: Optimizer, *_: Any) -> None:
    for weight in _with_gradient(optimizer):
        optimizer.state[weight] |= {key: optimizer.state[weight][key].codes for key in MOMENTS}


@cache
def _code_values(device: torch.device, signed: bool) -> Tensor:  # noqa: FBT001 - a part of the cache's key
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros(BLOCK, signed, BLOCK, device).qmap


def _split(optimizer: Optimizer, *_: Any) -> None:
    """Before a step of `muon`: each weight, its gradient and its state as the matrices that it stacks, in the same memory."""
    for group in optimizer.param_groups:
        group["stacked"], group["params"] = group["params"], []
        for weight in (w for w in group["stacked"] if w.grad is not None):
            state = optimizer.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            tensors = weight.detach(), weight.grad, state["momentum_buffer"]
            for matrix, gradient, momentum in zip(*(t.chunk(group["parts"]) for t in tensors), strict=True):
                matrix.grad = gradient
                optimizer.state[matrix] = {"momentum_buffer": momentum}
                group["params"].append(matrix)


def _join(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for matrix in group["params"]:
            del optimizer.state[matrix]
        group["params"] = group.pop("stacked")


def _with_gradient(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
