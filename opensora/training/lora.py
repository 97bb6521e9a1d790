"""Training with low-rank adapters (LoRA, Hu et al. 2021) from peft: the base is frozen, and only the adapters are state.

`add_lora` is applied from outside, like activation checkpointing: no model file knows of it. Layers such as the fused `qkv`
get one adapter for their whole output. The new factor B starts at zero, so the first step sees the base's own output.

A model with adapters shows only these in `state_dict`. So EMA, checkpoints and a resume keep some MB in place of the whole
model; the base comes from `model.from_pretrained` again.

Dropout is not peft's, which draws from PyTorch's global generator: a mask is a function of the run's seed, the rank, the
layer and the number of training passes, which is saved. So a resumed run and activation checkpointing draw the same.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.checkpoint.lora import COUNTER, FACTOR
from opensora.config.schema import LoraOptions
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.seed import generator

logger = logging.getLogger(__name__)


def check_lora() -> None:
    """Refuse to train adapters where that cannot work, before anything is loaded.

    Raises:
        UserError: peft is not installed.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"lora needs the package peft: pip install -e '.[lora]' ({error}). Sampling with a LoRA works without."
        ) from error


def add_lora(model: Any, options: LoraOptions, *, seed: int) -> None:
    """Put adapters into a `Denoiser` on its device, in place, and freeze everything else; `seed` is of the dropout.

    The initial A is drawn from PyTorch's global generator, like other initial weights.

    Raises:
        UserError: peft is not installed, or a name of `target_modules` is that of no layer.
    """
    check_lora()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    names = target_names(model, options.target_modules)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # a float will do
        lora_dropout=options.dropout,
        target_modules=names,
        bias="none",
    )
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(FACTOR.search(name) is not None)
        if parameter.requires_grad:  # peft gives adapters the dtype of the base, which may be stored in bf16
            parameter.data = parameter.data.float()
    for layer in model.modules():  # of a base in fp8, whose three bits are too few for an initial A
        if isinstance(layer, LoraLayer) and layer.get_base_layer().weight.dtype == torch.float8_e4m3fn:
            layer.reset_lora_parameters("default", init_lora_weights=True)
    if options.dropout > 0:
        rank = dist.get_rank() if dist.is_initialized() else 0
        passes = _Passes(model)
        for name, module in list(model.named_modules()):
            if name.endswith(".lora_dropout"):
                for adapter in list(module._modules):
                    module._modules[adapter] = _Dropout(options.dropout, passes, seed, "lora dropout", rank, name)
    model.register_state_dict_post_hook(_keep_adapters)
    model.register_load_state_dict_post_hook(_require_adapters)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logger.info("LoRA of rank %d in %d linear layers: %.2f M parameters.", options.rank, len(names), trained / 1e6)


def target_names(model: Any, targets: str | Sequence[str]) -> list[str]:
    """Full names of the linear layers, inside the blocks, that `LoraOptions.target_modules` means.

    Raises:
        UserError: a name is that of no layer, or there are no such layers.
    """
    inside = {id(m): end for block in model.transformer_blocks() for end, m in block.named_modules()}
    layers = {name: inside[id(m)] for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside}
    ends = sorted({*layers.values()})
    if targets in ("all-linear", "attention"):
        found = [name for name, end in layers.items() if targets == "all-linear" or "attn" in end.rpartition(".")[0]]
        if not found:
            what = "linear layer" if targets == "all-linear" else "linear layer inside of a module called attn"
            raise UserError(
                f"lora.target_modules={targets!r}: {type(model).__name__} has no {what} in its blocks. "
                f"It has: {', '.join(ends) or 'none at all'}; name some of these."
            )
        return found
    chosen: set[str] = set()
    for end in targets:
        found = [name for name in layers if f".{name}".endswith(f".{end}")]
        if not found:
            raise UserError(
                f"lora.target_modules: {type(model).__name__} has no linear layer {end!r} in its blocks."
                f"{did_you_mean(end, ends)} It has: {', '.join(ends)}."
            )
        chosen.update(found)
    return [name for name in layers if name in chosen]


def _is_state(name: str, prefix: str) -> bool:
    return FACTOR.search(name) is not None or name == prefix + COUNTER


def _keep_adapters(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for name in [name for name in state if not _is_state(name, prefix)]:
        del state[name]


def _require_adapters(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if _is_state(name, "")]


class _Passes:
    """Numbers the training passes of a model; the next number is a buffer, so that it is saved."""

    def __init__(self, model: nn.Module) -> None:
        self.number = 0
        device = next(model.parameters()).device
        model.register_buffer(COUNTER, torch.zeros((), dtype=torch.int64, device=device))
        model.register_forward_pre_hook(self._begin)

    def _begin(self, model: nn.Module, _args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            counter = model.get_buffer(COUNTER)
            self.number = int(counter)
            counter += 1


class _Dropout(nn.Module):
    """Dropout whose mask is drawn by a generator of its own; see the module's docstring."""

    def __init__(self, p: float, passes: _Passes, *path: int | str) -> None:
        super().__init__()
        self.p, self.passes, self.path = p, passes, path

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape, some of it zero and the rest scaled up."""
        if not self.training:
            return x
        rng = generator(*self.path, self.passes.number, device=x.device)
        kept = torch.rand(x.shape, generator=rng, device=x.device) >= self.p
        return x * kept / (1 - self.p)
