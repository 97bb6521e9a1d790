"""The second player of a VAE's training: a discriminator, its optimizer and engine, and what they add to the loss.

    loss += lambda * weight * g,   g = -mean D(x^)

VQGAN (Esser et al. 2021, arXiv:2012.09841, eq. 7): lambda = |grad rec| / (|grad g| + 1e-4), both gradients taken at the
decoder's last layer, so that neither drowns the other. Before the start step nothing of it is computed. `Nobody` stands
where a config names no discriminator: the train loop is the same with both.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from opensora.acceleration.distributed import mean_over_ranks
from opensora.acceleration.engine import Engine
from opensora.acceleration.engines.update import LossScale
from opensora.training.lr_scheduler import set_lr
from opensora.training.vae_losses import discriminator_loss, generator_loss

Scale = Literal["adaptive", "fixed"]
LARGEST_LAMBDA = 1e4
PARTS = ("discriminator", "discriminator_optimizer")


class Player(Protocol):
    """What the train loop asks of its opponent."""

    def set_lr(self, fraction: float) -> None:
        """Learn at this fraction of the discriminator's learning rate."""

    def wish(
        self, x_hat: Tensor, reconstruction: Tensor, last_layer: Tensor, step: int, loss_scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What to add to the generator's loss at this step, and numbers for the log; `loss_scale` is the generator's."""

    def learn(self, x: Tensor, x_hat: Tensor, step: int, *, last: bool, share: float) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch, which is `share` of a step; numbers for the log."""

    def step(self, step: int, grad_norm: Tensor) -> Tensor:
        """The optimizer step that ends training step `step`, counted from 0.

        Returns:
            The generator's `grad_norm`, or one that is no number where the own is none: then this step was not taken.
        """

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parts of a checkpoint."""

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """The reverse of `state`."""


class Nobody:
    """No discriminator."""

    def set_lr(self, fraction: float) -> None:
        """See `Player.set_lr`."""

    def wish(
        self, x_hat: Tensor, reconstruction: Tensor, last_layer: Tensor, step: int, loss_scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Player.wish`."""
        return reconstruction.new_zeros(()), {}

    def learn(self, x: Tensor, x_hat: Tensor, step: int, *, last: bool, share: float) -> dict[str, Tensor]:
        """See `Player.learn`."""
        return {}

    def step(self, step: int, grad_norm: Tensor) -> Tensor:
        """See `Player.step`."""
        return grad_norm

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Player.state`."""
        return {}

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """See `Player.load`."""


class Adversary:
    """A discriminator that learns.

    Args:
        discriminator: Videos [B, 3, T, H, W] -> scores.
        engine: Around it and its optimizer.
        optimizer: The engine's.
        lr: Its learning rate at its highest.
        weight: Of g.
        start: Training steps without it, for it learns nothing from what the first steps make.
        scale: "adaptive" multiplies the weight by lambda, "fixed" does not.
    """

    def __init__(
        self,
        discriminator: nn.Module,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        weight: float = 0.5,
        start: int = 0,
        scale: Scale = "adaptive",
    ) -> None:
        self.discriminator, self.engine, self.optimizer = discriminator, engine, optimizer
        self.lr, self.weight, self.start, self.scale = lr, weight, start, scale

    def set_lr(self, fraction: float) -> None:
        """See `Player.set_lr`."""
        set_lr(self.optimizer, self.lr * fraction)

    def wish(
        self, x_hat: Tensor, reconstruction: Tensor, last_layer: Tensor, step: int, loss_scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Player.wish`."""
        if step < self.start:
            return reconstruction.new_zeros(()), {}
        self.discriminator.requires_grad_(False)
        g = generator_loss(self.discriminator(x_hat))
        self.discriminator.requires_grad_(True)
        factor = torch.ones_like(g)
        if self.scale == "adaptive":
            factor = self._lambda(reconstruction, g, last_layer, loss_scale)
        return self.weight * factor * g, {"g_loss": g.detach(), "g_scale": factor}

    def learn(self, x: Tensor, x_hat: Tensor, step: int, *, last: bool, share: float) -> dict[str, Tensor]:
        """See `Player.learn`."""
        if step < self.start:
            return {}
        with self.engine.micro_step(last=last):
            both = self.engine.model(
                torch.cat([x, x_hat.detach().to(x.dtype)])
            )  # one pass: DDP shares gradients of one
            real, fake = both.chunk(2)
            loss = discriminator_loss(real, fake)
        self.engine.backward(loss * share)
        return {"d_loss": loss.detach(), "d_real": real.detach().float().mean(), "d_fake": fake.detach().float().mean()}

    def step(self, step: int, grad_norm: Tensor) -> Tensor:
        """See `Player.step`."""
        return grad_norm if step < self.start else grad_norm + self.engine.step() * 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Player.state`."""
        return dict(zip(PARTS, (self.engine.model_state(), self.engine.optimizer_state()), strict=True))

    def load(self, parts: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """See `Player.load`."""
        self.engine.load_model_state(parts[PARTS[0]], source)
        self.engine.load_optimizer_state(parts[PARTS[1]])

    def _lambda(self, reconstruction: Tensor, g: Tensor, last_layer: Tensor, loss_scale: LossScale) -> Tensor:
        """One number for all processes: of the gradients of the whole batch, scaled as the loss is, or fp16 would lose them.

        Where both overflow it is 0; the step is then not taken.
        """
        norms = [
            mean_over_ranks(torch.autograd.grad(loss_scale(loss), last_layer, retain_graph=True)[0].float()).norm()
            / loss_scale.scale
            for loss in (reconstruction, g)
        ]
        return (norms[0] / (norms[1] + 1e-4)).clamp(0, LARGEST_LAMBDA).nan_to_num(0.0).detach()


def saved_parts(checkpoint: Any) -> dict[str, dict[str, Tensor]]:
    """The discriminator's parts of an open checkpoint; none when it was written without one."""
    return {part: checkpoint.tensors(part) for part in PARTS if (checkpoint.path / part).is_dir()}
