"""How far a fast training step is from eager fp32: its prediction, and the gradients of all weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from opensora.acceleration.checkpointing import checkpoint_activations


class Steps(Protocol):
    """What of an `Engine` takes a training step."""

    model: nn.Module

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """See `Engine.micro_step`."""

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""

    def step(self) -> Tensor:
        """See `Engine.step`."""


class Exact(NamedTuple):
    """What eager fp32 gives for the first sample of a batch; on the CPU, so that it takes no memory from what is measured."""

    prediction: Tensor
    gradients: dict[str, Tensor]  # of the loss of `_loss`, by the names of the weights


class Errors(NamedTuple):
    """Relative, in 2-norms; None = not to be had."""

    prediction: float | None
    gradient: float | None

    def cells(self) -> list[str]:
        """For a table."""
        return ["-" if error is None else f"{error:.2g}" for error in self]


def exact(model: Any, z: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Exact:
    """Of a denoiser in fp32, which is not to be used afterwards: its blocks are checkpointed, and it keeps gradients."""
    checkpoint_activations(model.transformer_blocks())
    found = model(z[:1], t[:1], **{name: value[:1] for name, value in cond.items()})
    _loss(found).backward()
    return Exact(found.detach().cpu(), {name: grad.cpu() for name, grad in _gradients(model)})


def errors_of(engine: Steps, z: Tensor, t: Tensor, cond: dict[str, Tensor], right: Exact) -> Errors:
    """Of the forward and the backward pass that training uses, on the whole batch; the loss looks at its first sample."""
    with engine.micro_step(last=True):
        out = engine.model(z, t, **cond)
        loss = _loss(out[:1])
    engine.backward(loss)
    wanted = right.prediction.to(out.device)
    prediction = float((out[:1].detach().float() - wanted).norm() / wanted.norm())
    scaled = getattr(engine, "scales_loss", False)  # fp16: the gradients are multiplied by a number of the engine's own
    gradient = None if scaled else _gradient_error(engine.model, right.gradients)
    for weight in engine.model.parameters():
        weight.grad = None
    return Errors(prediction, gradient)


def _loss(prediction: Tensor) -> Tensor:
    """A sum with random signs, so that no part of the prediction is more important."""
    rng = torch.Generator(prediction.device).manual_seed(0)
    signs = torch.randint(0, 2, prediction.shape, generator=rng, device=prediction.device) * 2 - 1
    return (prediction.float() * signs).mean()


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            yield name, weight.grad


def _gradient_error(model: nn.Module, right: dict[str, Tensor]) -> float:
    """A weight without a gradient where there should be one counts as zero."""
    found = dict(_gradients(model))
    difference = norm = 0.0
    for name, grad in right.items():
        wanted = grad.to(next(model.parameters()).device)
        off = wanted - found[name].float() if name in found else wanted
        difference += float(off.double().square().sum())
        norm += float(wanted.double().square().sum())
    return (difference / norm) ** 0.5
