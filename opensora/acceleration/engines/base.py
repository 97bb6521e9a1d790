"""What `ddp` and `fsdp2` do alike: autocast, backward, the optimizer's step on the fp32 weights, and their state.

The model holds the fp32 masters, whole or as shards. The optimizer works on plain tensors: these weights, this process's shards of
them, or copies on the CPU. So any optimizer runs at its full speed, fused, with `fsdp2` as with `ddp`.

One number, the global gradient norm, decides the end of a step. It gives the factor that clips; with fp16 it shows whether the
scaled gradients overflowed; and a step whose norm is not finite is not taken. All processes have the same norm, so they agree
without another message.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from opensora.acceleration.distributed import World
from opensora.checkpoint.load import load_strictly
from opensora.checkpoint.tensors import SavedTensors, load_into
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_
COUNTER = "step"
"""The state of PyTorch's optimizers that is no moment of a weight: `Optimizer.load_state_dict` knows it by this name too.

By its shape it would be taken for one where the weight is a scalar. Of the others, those with as many rows as the weight (the size of
dimension 0) are laid out as it is.
"""


class LossScale:
    """The factor that keeps fp16 gradients above underflow (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    Halved by a step that overflows, doubled after 2000 that do not. It stays on the device: nothing waits for it.
    torch.amp.GradScaler does the same for an optimizer that sees all gradients; here it may see a share of them. Not
    `enabled`, it leaves the loss as it is.
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
        if self.enabled:
            grows = finite & (self.good_steps + 1 == GROWTH_INTERVAL)
            self.good_steps = torch.where(finite & ~grows, self.good_steps + 1, 0)
            self.scale = torch.where(finite, torch.where(grows, self.scale * 2, self.scale), self.scale / 2)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; empty when it is not used."""
        state = {"/scale": self.scale.double(), "/_growth_tracker": self.good_steps.double()}
        return state if self.enabled else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of `state`; without one the scale begins anew."""
        if self.enabled and "/scale" in state:
            self.scale = state["/scale"].to(self.scale)
            self.good_steps = state["/_growth_tracker"].to(self.good_steps)


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients together, fp32 [] on `device`; `group` are the processes that hold other parts of them."""
    norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()]).to(device)
    if group is None:
        return norm.float()
    total = norm.double().square()
    dist.all_reduce(total, group=group)
    return total.sqrt().float()


@torch.no_grad()
def take_step(
    optimizer: Optimizer, gradients: Sequence[Tensor], norm: Tensor, grad_clip: float, scale: Tensor | None = None
) -> Tensor:
    """Clip and take the optimizer's step, if the gradients are finite; returns whether they are, bool [].

    A fused optimizer multiplies while it reads, and skips without asking the device: a pass over all gradients and a
    wait less.

    Args:
        gradients: of the optimizer's parameters, to be changed in place.
        norm: the global norm [].
        grad_clip: largest norm; 0 = no clipping.
        scale: what the gradients are multiplied by, [], and the norm is not; None = 1.
    """
    finite = torch.isfinite(norm)
    factor = (grad_clip / (norm + EPSILON)).clamp(max=1.0) if grad_clip else None
    if scale is not None:
        factor = (1 if factor is None else factor) / scale
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
    return finite


class MastersEngine:
    """An engine (see `Engine`) whose model holds the fp32 masters, whole or as DTensors.

    Args:
        model: with names and state as in checkpoints.
        optimizer, world, dtype, grad_clip: see `build_engine`.
        given: name -> the parameter that the optimizer was made with; from now on it has `leaves` in their place.
        mine: names that this process's optimizer changes; None = all.
        offload: keep what the optimizer works on, and its state, on the CPU, and take the step there. It saves 8 bytes for each
            fp32 weight on the device with AdamW, and takes time for copies and the slower step.
        norm_group: processes that hold the other parts of the gradients; None = each process has all.

    Raises:
        UserError: the optimizer has parameters that the model does not have.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: nn.Module,
        optimizer: Optimizer,
        given: Mapping[str, Tensor],
        world: World,
        dtype: str,
        grad_clip: float,
        *,
        mine: Iterable[str] | None = None,
        offload: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.raw_model, self.optimizer, self.offload = model, optimizer, offload
        self.device, self.dtype = world.device, to_torch_dtype(dtype)
        self.grad_clip, self.norm_group = grad_clip, norm_group
        self.loss_scale = LossScale(self.device, enabled=self.scales_loss)
        self.weights = dict(model.named_parameters())
        names = {parameter: name for name, parameter in given.items()}
        if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
            raise UserError("the optimizer has parameters that the model does not have: make it from this model's.")
        kept = set(self.weights if mine is None else mine)
        self.trained: list[str] = []
        self.leaves: dict[str, nn.Parameter] = {}  # what the optimizer has in a weight's place
        for group in optimizer.param_groups:
            own = [names[parameter] for parameter in group["params"]]
            self.trained += own
            self.leaves |= {name: self._leaf(self.weights[name]) for name in own if name in kept}
            group["params"] = [self.leaves[name] for name in own if name in kept]
        self._up_to_date = not offload  # a copy is made as late as possible: weights may be loaded before

    @property
    def scales_loss(self) -> bool:
        return self.dtype == torch.float16  # whose gradients underflow otherwise

    def autocast(self, *, keep_casts: bool = True) -> torch.autocast:
        """The dtype of a forward pass; `keep_casts` keeps a weight's cast until the pass has ended."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=enabled, cache_enabled=keep_casts)

    def backward(self, loss: Tensor) -> None:
        self.loss_scale(loss).backward()

    @torch.no_grad()
    def step(self) -> Tensor:
        gradients = [local(g) for name in self.trained if (g := self.weights[name].grad) is not None]
        norm = global_norm(gradients, self.device, self.norm_group) / self.loss_scale.scale
        if not self._up_to_date:
            for name, leaf in self.leaves.items():
                leaf.copy_(local(self.weights[name]))
            self._up_to_date = True
        for name, leaf in self.leaves.items():
            gradient = self.weights[name].grad
            if leaf is self.weights[name]:
                continue
            if gradient is None or not self.offload:
                leaf.grad = None if gradient is None else local(gradient)
            else:
                if leaf.grad is None:
                    leaf.grad = torch.empty_like(leaf, pin_memory=gradient.is_cuda)
                leaf.grad.copy_(local(gradient), non_blocking=True)
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()
        gradients = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        scale = self.loss_scale.scale if self.loss_scale.enabled else None
        self.loss_scale.update(take_step(self.optimizer, gradients, norm, self.grad_clip, scale))
        for name, leaf in self.leaves.items():
            if self.offload:
                local(self.weights[name]).copy_(leaf, non_blocking=True)  # done before the next step synchronizes
            elif leaf is not self.weights[name]:
                leaf.grad = None
        for name in self.trained:
            self.weights[name].grad = None
        return norm

    def masters(self) -> Mapping[str, Tensor]:
        return {}  # the model has them

    def model_state(self) -> dict[str, Tensor]:
        return self.raw_model.state_dict()

    def load_model_state(self, state: Mapping[str, Tensor], source: str) -> None:
        load_strictly(self.raw_model, state, source)

    def optimizer_state(self) -> dict[str, Tensor]:
        state = {
            f"{name}/{key}": self._placed(name, key, torch.as_tensor(value))
            for name, leaf in self.leaves.items()
            for key, value in self.optimizer.state.get(leaf, {}).items()
        }
        return state | self.loss_scale.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        self.optimizer.state.clear()
        self._up_to_date = not self.offload
        group_of = {leaf: group for group in self.optimizer.param_groups for leaf in group["params"]}
        for path in state:
            name, key = path.rsplit("/", 1)
            if name and name not in self.weights:
                raise UserError(f"the optimizer state is of another model: there is no parameter {name!r}.")
            if name not in self.leaves:
                continue
            leaf = self.leaves[name]
            found = state.meta(path) if isinstance(state, SavedTensors) else state[path]
            dtype = leaf.dtype if found.is_floating_point() else found.dtype  # codes stay what they are
            if key == COUNTER:  # AdamW counts in fp32, and on the CPU unless it is fused
                on_device = group_of[leaf].get("fused") or group_of[leaf].get("capturable")
                value = torch.zeros(found.shape, device=leaf.device if on_device else "cpu")
            elif found.shape == self.weights[name].shape:
                value = torch.zeros_like(leaf, dtype=dtype, requires_grad=False)
            elif found.shape[:1] == self.weights[name].shape[:1]:
                value = torch.zeros(leaf.shape[:1] + found.shape[1:], dtype=dtype, device=leaf.device)
            else:
                value = torch.zeros(found.shape, device=leaf.device)
            placed = self._placed(name, key, value)
            load_into(placed, state, path)
            self.optimizer.state[leaf][key] = local(placed)
        self.loss_scale.load_state({path: state[path] for path in state if path.startswith("/")})

    def _leaf(self, weight: nn.Parameter) -> nn.Parameter:
        if self.offload:
            return nn.Parameter(torch.empty_like(local(weight), device="cpu", pin_memory=weight.is_cuda))
        return nn.Parameter(local(weight)) if isinstance(weight, DTensor) else weight  # the same memory

    def _placed(self, name: str, key: str, value: Tensor) -> Tensor:
        """A state as what it is: part of a DTensor laid out as the weight, or the same in all processes."""
        weight = self.weights[name]
        as_rows = value.ndim > 0 and value.shape[:1] == self.leaves[name].shape[:1]
        if not isinstance(weight, DTensor) or key == COUNTER or not as_rows:
            return value
        mesh, shape = weight.device_mesh, weight.shape[:1] + value.shape[1:]
        on_mesh = value if value.device.type == mesh.device_type else torch.empty_like(value, device=mesh.device_type)
        stride = torch.empty(shape, device="meta").stride()
        placed: Tensor = DTensor.from_local(on_mesh, mesh, weight.placements, shape=shape, stride=stride)
        if on_mesh is not value:
            placed = torch.empty_like(placed, device=value.device)
            local(placed).copy_(value)
        return placed


def local(tensor: Tensor) -> Tensor:
    """This process's part, without autograd, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
