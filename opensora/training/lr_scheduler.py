"""The learning rate as a function of the optimizer step alone: the same on any number of ranks and after a resume."""

import math

from torch.optim import Optimizer


def lr_at(step: int, base: float, *, warmup_steps: int = 0, schedule: str = "constant", total_steps: int = 0) -> float:
    """The learning rate of optimizer step number `step` (the first is 0).

    Linear warm-up `base * (step + 1) / (warmup_steps + 1)`, then constant, or a cosine that reaches zero at
    `total_steps`.
    """
    if step < warmup_steps:
        return base * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return base
    if schedule == "cosine":
        done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return base * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    raise ValueError(f"lr_schedule {schedule!r} is not one of 'constant', 'cosine'.")


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
