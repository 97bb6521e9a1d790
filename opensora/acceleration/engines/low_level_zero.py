"""`zero2` and `zero2-seq`: ZeRO stage 2 by ColossalAI's LowLevelZeroOptimizer (0.5.0), alone and under sequence parallelism.

The model computes with trained weights in bf16 or fp16, whole in each process. fp32 masters, gradients and optimizer state
are sharded over the whole world: each weight is flattened, padded and cut into equal chunks. Gradients are averaged in
fp32, one micro-batch at a time.

The optimizer is used without ColossalAI's booster, which would cast timesteps and sizes to bf16, and 513 to 514.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad
from torch.optim import Optimizer

from opensora.acceleration.distributed import World, join_alone
from opensora.acceleration.engines.base import COUNTER, FIRST_SCALE, GROWTH_INTERVAL, global_norm
from opensora.checkpoint.load import load_strictly
from opensora.registry import PLUGINS
from opensora.utils.dtype import HALF, to_torch_dtype
from opensora.utils.errors import UserError

NAMES = ("zero2", "zero2-seq")
INSTALL = "pip install --no-deps colossalai==0.5.0 galore-torch bitsandbytes contexttimer"
BUCKET = 20 * 2**20  # elements that one message reduces; the default, 2**20, makes hundreds of messages


def check(name: str, device: torch.device, dtype: str) -> None:
    """Refuse what ColossalAI's optimizer cannot do.

    Raises:
        UserError: there is no GPU, the computation is fp32, or ColossalAI cannot be imported.
    """
    if device.type != "cuda":
        raise UserError(f"plugin={name!r} needs a GPU: ColossalAI's optimizer refuses a CPU. Use --plugin fsdp2.")
    if to_torch_dtype(dtype) not in HALF:
        raise UserError(
            f"plugin={name!r} computes in bf16 or fp16, not in {dtype}. Use --plugin fsdp2, or --dtype bf16."
        )
    try:
        from colossalai.zero import LowLevelZeroOptimizer  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"plugin={name!r} needs ColossalAI ({error}). Install it with\n  {INSTALL}\nor use --plugin fsdp2."
        ) from error


class LowLevelZeroEngine:
    """ColossalAI's ZeRO stage 2; the model's trained weights become bf16 or fp16. See `Engine`; states are gathered, on the CPU.

    Args:
        model, optimizer, world, dtype, grad_clip: see `build_engine`.

    Raises:
        UserError: see `check`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, world: World, dtype: str = "bf16", grad_clip: float = 0.0
    ) -> None:
        check("zero2", world.device, dtype)
        join_alone(world.device)
        from colossalai.zero import LowLevelZeroOptimizer

        self.model, self.device, self.dtype = model, world.device, to_torch_dtype(dtype)
        self.rank, self.size = world.rank, world.size
        self.mesh = init_device_mesh("cuda", (world.size,))
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.weights = {names[p]: p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        exact = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.zero = LowLevelZeroOptimizer(
            optimizer,
            forced_dtype=self.dtype,
            partition_grad=True,
            clip_grad_norm=grad_clip,
            communication_dtype=torch.float32,
            reduce_bucket_size=BUCKET,
            overlap_communication=True,
            overlap_allgather=False,  # its hooks break compiled blocks
            initial_scale=int(FIRST_SCALE),
            growth_interval=GROWTH_INTERVAL,
            hysteresis=1,
        )
        self._masters: dict[str, Tensor] = {
            name: self.zero.get_working_to_master_map()[id(weight)] for name, weight in self.weights.items()
        }
        self._fill_masters(exact)  # it made them from the rounded weights

    @property
    def scales_loss(self) -> bool:
        return self.dtype == torch.float16

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        with torch.autocast("cuda", self.dtype):
            yield

    def backward(self, loss: Tensor) -> None:
        self.zero.backward(loss)

    @torch.no_grad()
    def step(self) -> Tensor:
        gradients = [g for i in range(self.zero.num_param_groups) for g in self.zero.get_working_grads_by_group_id(i)]
        norm = global_norm([g.float() for g in gradients], self.device, self.mesh.get_group())
        if self.scales_loss:
            norm = norm / float(self.zero.mixed_precision_mixin.grad_scaler.scale)
        if self.scales_loss or torch.isfinite(norm):  # with fp16 it sees for itself, and lowers its scale
            self.zero.step()
        self.zero.zero_grad()
        return norm

    def masters(self) -> Mapping[str, Tensor]:
        # each process holds its chunk, without the padding
        flat = {}
        for name, master in self._masters.items():
            count = self.weights[name].numel()
            own = master[: max(count - self.rank * master.numel(), 0)]
            flat[name] = DTensor.from_local(own, self.mesh, [Shard(0)], shape=torch.Size([count]), stride=(1,))
        return flat

    def model_state(self) -> dict[str, Tensor]:
        return self.model.state_dict() | {name: self._whole(name, master) for name, master in self._masters.items()}

    def load_model_state(self, state: Mapping[str, Tensor], source: str) -> None:
        load_strictly(self.model, state, source)
        self._fill_masters(state)

    def optimizer_state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, master in self._masters.items():
            for key, value in self.zero.optim.state.get(master, {}).items():
                sharded = key != COUNTER and torch.is_tensor(value) and value.shape == master.shape
                tensors[f"{name}/{key}"] = self._whole(name, value) if sharded else torch.as_tensor(value).cpu()
        if self.scales_loss:
            scaler = self.zero.mixed_precision_mixin.grad_scaler
            tensors["/scale"] = scaler.scale.reshape(()).double()
            tensors["/_growth_tracker"] = torch.tensor(float(scaler._growth_step), dtype=torch.float64)
        return tensors

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        self.zero.optim.state.clear()
        for path in state:
            name, key = path.rsplit("/", 1)
            if name and name not in dict(self.model.named_parameters()):
                raise UserError(f"the optimizer state is of another model: there is no parameter {name!r}.")
            if name in self._masters:
                # a copy in any case: what is given may be mapped from a file, which would be kept
                value, fused = state[path], self.zero.optim.defaults.get("fused")
                own = self._part(value) if key != COUNTER and value.shape == self.weights[name].shape else value
                device = self.device if key != COUNTER or fused else "cpu"  # AdamW counts on the CPU unless it is fused
                self.zero.optim.state[self._masters[name]][key] = own.to(device, copy=True)
        if self.scales_loss and "/scale" in state:
            scaler = self.zero.mixed_precision_mixin.grad_scaler
            scaler.scale.fill_(float(state["/scale"]))
            scaler._growth_step = int(state["/_growth_tracker"])

    @torch.no_grad()
    def _fill_masters(self, weights: Mapping[str, Tensor]) -> None:
        for name, master in self._masters.items():
            master.copy_(self._part(weights[name]))

    def _part(self, whole: Tensor) -> Tensor:
        """This process's chunk of a weight, flat and padded as ColossalAI cuts it."""
        flat = pad(whole.flatten(), (0, -whole.numel() % self.size))
        return flat.chunk(self.size)[self.rank]

    def _whole(self, name: str, part: Tensor) -> Tensor:
        weight = self.weights[name]
        gathered = torch.empty(part.numel() * self.size, device=self.device, dtype=part.dtype)
        dist.all_gather_into_tensor(gathered, part.to(self.device).contiguous())
        return gathered[: weight.numel()].view(weight.shape).cpu()


for _name in NAMES:
    PLUGINS.register_module(name=_name, module=LowLevelZeroEngine)
