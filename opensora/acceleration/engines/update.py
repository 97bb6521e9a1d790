"""The end of a training step: one number, the global gradient norm, decides everything.

It gives the factor that clips; with fp16 it shows whether the scaled gradients overflowed; and a step whose norm is not
finite is not taken. All processes have the same norm, so they agree without another message.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class LossScale:
    """The factor that keeps fp16 gradients above underflow (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    Halved by a step that overflows, doubled after 2000 that do not. It stays on the device: nothing waits for it.
    torch.amp.GradScaler does the same for an optimizer that sees all gradients; here it may see a share of them.

    Args:
        device: where the loss is.
        enabled: False leaves the loss as it is.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.tensor(FIRST_SCALE if enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss * self.scale.to(loss.device) if self.enabled else loss

    def update(self, finite: Tensor) -> None:
        """Learn from a step whose gradients were finite, bool [], or not."""
        if not self.enabled:
            return
        grows = finite & (self.good_steps + 1 == GROWTH_INTERVAL)
        self.good_steps = torch.where(finite & ~grows, self.good_steps + 1, 0)
        self.scale = torch.where(finite, torch.where(grows, self.scale * 2, self.scale), self.scale / 2)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; empty when it is not used."""
        if not self.enabled:
            return {}
        return {"/scale": self.scale.double(), "/_growth_tracker": self.good_steps.double()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The reverse of `state`; without one the scale begins anew."""
        if self.enabled and state:
            self.scale = state["/scale"].to(self.scale)
            self.good_steps = state["/_growth_tracker"].to(self.good_steps)


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients together, fp32 [].

    Args:
        gradients: this process's.
        device: of the result.
        group: processes that hold the other parts; None = there are none.
    """
    norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()]).to(device)
    if group is None:
        return norm.float()
    total = norm.double().square()
    dist.all_reduce(total, group=group)
    return total.sqrt().float()


@torch.no_grad()
def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """What to multiply gradients of this norm by, so that it is `limit` at most; None = nothing, for `limit=0`."""
    return (limit / (norm + EPSILON)).clamp(max=1.0) if limit else None


@torch.no_grad()
def take_step(optimizer: Optimizer, gradients: Sequence[Tensor], factor: Tensor | None, finite: Tensor) -> None:
    """The optimizer's step with its parameters' gradients times `factor`, if they are finite.

    A fused optimizer multiplies while it reads, and skips without asking the device: a pass over all gradients and a
    wait less.

    Args:
        optimizer: its parameters have their gradients.
        gradients: the same gradients, to be changed in place.
        factor: [], of clipping and the loss scale; None = 1.
        finite: bool [].
    """
    if optimizer.defaults.get("fused") and gradients:
        device = gradients[0].device
        fused = {"found_inf": (~finite).to(device, torch.float32)}
        fused |= {} if factor is None else {"grad_scale": (1 / factor).to(device)}
        vars(optimizer).update(fused)  # as torch.amp.GradScaler hands them over
        optimizer.step()
        for name in fused:
            delattr(optimizer, name)
    elif finite:
        if factor is not None and gradients:
            torch._foreach_mul_(list(gradients), factor.to(gradients[0].device))
        optimizer.step()
