"""The optimizers of the config's `optimizer` besides AdamW: most weights take theirs, the others AdamW, behind one interface.

Outside of a step all state is plain tensors that lie as the weights do, so that engines shard and checkpoints store it as AdamW's.
"""

import re
from collections.abc import Iterable
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

    These have at least `MIN_8BIT_SIZE` elements, and rows of whole blocks: then rows are what a scale belongs to, and a shard of
    rows has the scales of its rows. State of a weight [N, ...]: the codes `exp_avg`, `exp_avg_sq`, uint8 [N, ...], and their
    scales `exp_avg_scale`, `exp_avg_sq_scale`, fp32 [N, elements of a row / `BLOCK`].

    Args:
        weights: fp32.
        settings: of AdamW.
    """
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    suited = [w for w in weights if w.ndim > 1 and w.numel() >= MIN_8BIT_SIZE and w.shape[1:].numel() % BLOCK == 0]
    if not suited:
        return None
    tables: dict[tuple[torch.device, bool], Tensor] = {}  # code -> value

    def stepped(optimizer: Optimizer) -> list[Tensor]:
        return [w for group in optimizer.param_groups for w in group["params"] if w.grad is not None]

    def to_torchao(optimizer: Optimizer, *_: Any) -> None:
        for w in stepped(optimizer):
            state = optimizer.state[w]
            if not state:
                state["step"] = torch.zeros(())
                for key in MOMENTS:
                    state[key] = torch.zeros_like(w, dtype=torch.uint8)
                    state[f"{key}_scale"] = w.new_zeros(len(w), w.shape[1:].numel() // BLOCK)
            if not w.numel():  # a process without a share of it
                w.grad = None
                continue
            for key, signed in MOMENTS.items():
                if (w.device, signed) not in tables:
                    tables[w.device, signed] = OptimState8bit.zeros(BLOCK, signed, BLOCK, w.device).qmap
                scale = state[f"{key}_scale"].view(-1)
                state[key] = OptimState8bit(state[key], scale, tables[w.device, signed], signed)

    def to_plain(optimizer: Optimizer, *_: Any) -> None:
        for w in stepped(optimizer):
            optimizer.state[w] |= {key: optimizer.state[w][key].codes for key in MOMENTS}

    optimizer = AdamW8bit(suited, **settings)
    optimizer.register_step_pre_hook(to_torchao)
    optimizer.register_step_post_hook(to_plain)
    return optimizer


def muon(model: nn.Module, lr: float, weight_decay: float) -> Optimizer | None:
    """torch.optim.Muon over the weights of the linear layers in `model.transformer_blocks()`; None = none of them is trained.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) with the update's size of Liu et al. 2025 (arXiv:2502.16982, eq. 4), so
    that AdamW's `lr` and `weight_decay` serve. Layers of modulation are left out. Of a layer that computes queries, keys and
    values at once, each of them is a matrix of its own; state of a weight: `momentum_buffer`, as the weight.
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

    def split(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["whole"], group["params"] = group["params"], []
            for w in group["whole"]:
                if w.grad is None:
                    continue
                state = optimizer.state[w]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(w.grad)
                tensors = w.detach(), w.grad, state["momentum_buffer"]
                for part, gradient, momentum in zip(*(t.chunk(group["parts"]) for t in tensors), strict=True):
                    part.grad = gradient
                    optimizer.state[part] = {"momentum_buffer": momentum}
                    group["params"].append(part)

    def join(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for part in group["params"]:
                del optimizer.state[part]
            group["params"] = group.pop("whole")

    optimizer = torch.optim.Muon(
        list(groups.values()), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    optimizer.register_step_pre_hook(split)
    optimizer.register_step_post_hook(join)
    return optimizer
