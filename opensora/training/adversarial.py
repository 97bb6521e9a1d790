"""The adversarial loss of a VAE's training: a discriminator, its optimizer and engine, and its term of the loss.

    loss += lambda * weight * g,   g = -mean D(x^)

VQGAN (Esser et al. 2021, arXiv:2012.09841, eq. 7): lambda = |grad rec| / (|grad g| + 1e-4), both gradients taken at the
decoder's last layer, so that neither drowns the other. Before the start step nothing of it is computed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.acceleration.distributed import mean_over_ranks
from opensora.acceleration.engine import Engine
from opensora.acceleration.engines.base import LossScale
from opensora.training.loop import set_lr

LARGEST_LAMBDA = 1e4


@dataclass
class AdversarialLoss:
    """A discriminator and how it is trained."""

    discriminator: nn.Module  # videos [B, 3, T, H, W] -> scores
    engine: Engine  # around it and its optimizer
    optimizer: torch.optim.Optimizer
    lr: float  # its learning rate at its highest
    weight: float = 0.5  # of g
    start: int = 0  # training steps without it, while reconstructions are too poor to learn from
    scale: Literal["adaptive", "fixed"] = "adaptive"  # whether the weight is multiplied by lambda

    def set_lr(self, fraction: float) -> None:
        """Train at this fraction of `lr`."""
        set_lr(self.optimizer, self.lr * fraction)

    def generator_loss(
        self, x_hat: Tensor, reconstruction: Tensor, last_layer: Tensor, step: int, loss_scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What to add to the generator's loss at this step, and values for the log; `loss_scale` is the generator's."""
        if step < self.start:
            return reconstruction.new_zeros(()), {}
        self.discriminator.requires_grad_(False)
        g = -self.discriminator(x_hat).float().mean()
        self.discriminator.requires_grad_(True)
        factor = torch.ones_like(g)
        if self.scale == "adaptive":
            # of the gradients of the whole batch, the same in all processes; scaled as the loss is, or fp16 would lose them
            rec_norm, g_norm = (
                mean_over_ranks(torch.autograd.grad(loss_scale(loss), last_layer, retain_graph=True)[0].float()).norm()
                / loss_scale.scale
                for loss in (reconstruction, g)
            )
            # 0 where both overflow; the step is then not taken
            factor = (rec_norm / (g_norm + 1e-4)).clamp(0, LARGEST_LAMBDA).nan_to_num(0.0).detach()
        return self.weight * factor * g, {"g_loss": g.detach(), "g_scale": factor}

    def discriminator_step(self, x: Tensor, x_hat: Tensor, step: int, *, last: bool, share: float) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch, which is `share` of a step; values for the log."""
        if step < self.start:
            return {}
        with self.engine.micro_step(last=last):
            # one pass: DDP averages the gradients of one
            real, fake = self.engine.model(torch.cat([x, x_hat.detach().to(x.dtype)])).chunk(2)
            loss = hinge_loss(real, fake)
        self.engine.backward(loss * share)
        return {"d_loss": loss.detach(), "d_real": real.detach().float().mean(), "d_fake": fake.detach().float().mean()}

    def step(self, step: int, grad_norm: Tensor) -> Tensor:
        """The optimizer step that ends training step `step`, counted from 0.

        Returns:
            The generator's `grad_norm`, or one that is not finite where the discriminator's is not: then this step was not
            taken.
        """
        return grad_norm if step < self.start else grad_norm + self.engine.step() * 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Folders of a checkpoint."""
        return {"discriminator": self.engine.model_state(), "discriminator_optimizer": self.engine.optimizer_state()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """The reverse of `state`."""
        self.engine.load_model_state(state["discriminator"], source)
        self.engine.load_optimizer_state(state["discriminator_optimizer"])


class NoDiscriminator(AdversarialLoss):
    """Adds nothing to the loss and to checkpoints."""

    def __init__(self) -> None:
        self.start = sys.maxsize

    def set_lr(self, fraction: float) -> None:
        """Nothing to set."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Nothing to save."""
        return {}


def hinge_loss(real: Tensor, fake: Tensor) -> Tensor:
    """The discriminator's (Lim & Ye 2017, arXiv:1705.02894): mean of max(0, 1 - real) and max(0, 1 + fake)."""
    return 0.5 * (F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean())
