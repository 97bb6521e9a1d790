"""What `ddp` and `fsdp2` do alike: autocast, backward, the end of the step, and their state."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.engines.masters import Masters
from opensora.acceleration.engines.update import LossScale, clip_factor, global_norm, take_step
from opensora.checkpoint.load import load_strictly
from opensora.utils.dtype import to_torch_dtype


class MastersEngine:
    """An engine whose model holds the fp32 masters, whole or as shards.

    Args:
        model: with names and state as in checkpoints.
        masters: of its trained weights.
        device: of the model.
        dtype: of the computation; fp16 scales the loss.
        grad_clip: largest global gradient norm; 0 = no clipping.
        norm_group: processes that hold the other parts of the gradients; None = each process has all.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: Masters,
        device: torch.device,
        dtype: str,
        grad_clip: float,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.raw_model = model
        self.kept = masters
        self.optimizer = masters.optimizer
        self.device, self.dtype = device, to_torch_dtype(dtype)
        self.grad_clip = grad_clip
        self.norm_group = norm_group
        self.loss_scale = LossScale(device, enabled=self.scales_loss)

    @property
    def scales_loss(self) -> bool:
        """See `Engine.scales_loss`: fp16 gradients underflow otherwise; bf16 and fp32 do not need it."""
        return self.dtype == torch.float16

    def autocast(self, *, keep_casts: bool = True) -> torch.autocast:
        """The dtype of a forward pass; `keep_casts` keeps a weight's cast until the pass has ended."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=enabled, cache_enabled=keep_casts)

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        self.loss_scale(loss).backward()

    @torch.no_grad()
    def step(self) -> Tensor:
        """See `Engine.step`."""
        norm = global_norm(self.kept.gradients(), self.device, self.norm_group) / self.loss_scale.scale
        factor, finite = clip_factor(norm, self.grad_clip), torch.isfinite(norm)
        if self.loss_scale.enabled:
            factor = (1 if factor is None else factor) / self.loss_scale.scale
        take_step(self.optimizer, self.kept.receive(), factor, finite)
        self.loss_scale.update(finite)
        self.kept.deliver()
        return norm

    def masters(self) -> Mapping[str, Tensor]:
        """See `Engine.masters`: none, the model has them."""
        return {}

    def model_state(self) -> dict[str, Tensor]:
        """See `Engine.model_state`."""
        return self.raw_model.state_dict()

    def load_model_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """See `Engine.load_model_state`."""
        load_strictly(self.raw_model, state, source)

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `Engine.optimizer_state`."""
        return self.kept.state() | self.loss_scale.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Engine.load_optimizer_state`."""
        self.kept.load_state(state)
        self.loss_scale.load_state({path: state[path] for path in state if path.startswith("/")})
