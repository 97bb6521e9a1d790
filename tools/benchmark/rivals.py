"""What our training step is compared with: the reference's shipped settings, and diffusers' nearest models.

**The reference** is Open-Sora's own code. Its settings are re-created with our model, which has the same layers: eager, every
block checkpointed, weights in bf16 with fp32 masters as its ColossalAI ZeRO-2 holds them, plain operations, flash attention
over space and, on sequences [B S, T] whose tokens were copied into that order, over time. Its cross-attention is xformers' with
a block-diagonal mask, which lets each sample see its own text: the same work as attention without a mask, as all tokens of
the text are real here. On an H100 the reference's own code took 783 ms for a step of STDiT-XL/2 at 16x256x256, batch 8
(STDiT 1.0); how near this comes is how to judge it. Open-Sora 1.2 computes temporal attention by the plain formula
where there are more places than frames; here it is flash attention too.

**diffusers** has no STDiT. Its `LatteTransformer3DModel` is of the same kind, with a whole block of its own, MLP included, for
temporal attention: of the same width, it gets as many pairs of blocks as come nearest to the FLOPs of our model. Its
FLOPs are those of all matrix products it makes, those on texts that it repeats for every frame too, which favours it when rates are scaled to
equal FLOPs. It sees no mask, which is less work for it. `DiTTransformer2DModel` is DiT.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.engines.update import clip_factor, global_norm, take_step
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.mlp import TanhMlp

FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What the reference may use of PyTorch's attention: flash, or for sizes that it does not take what xformers has."""
IN_ORDER = {"space": "B T S D -> (B T) S D", "time": "B T S D -> (B S) T D", "all": "B T S D -> B (T S) D"}
BACK = {"space": "(B T) S D -> B T S D", "time": "(B S) T D -> B T S D", "all": "B (T S) D -> B T S D"}


class RoundedWeights:
    """Trains weights in bf16 with fp32 masters, alone: what `tools.benchmark.train_step.Steps` says.

    Args:
        model: on its device, in fp32; its weights and buffers become bf16.
        autocast: compute under bf16 autocast, for models that keep some numbers in fp32.
        grad_clip: largest global gradient norm.
    """

    def __init__(self, model: nn.Module, *, autocast: bool, grad_clip: float = 1.0) -> None:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in trained]
        self.model = model.to(torch.bfloat16)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.device = self.weights[0].device
        self.autocast, self.grad_clip = autocast, grad_clip
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=self.device.type == "cuda")

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """See `Engine.micro_step`."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        loss.backward()

    @torch.no_grad()
    def step(self) -> Tensor:
        """See `Engine.step`."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = global_norm(gradients, self.device)
        take_step(self.optimizer, gradients, clip_factor(norm, self.grad_clip), torch.isfinite(norm))
        torch._foreach_copy_(list[Tensor](self.weights), list[Tensor](self.masters))
        self.optimizer.zero_grad()
        return norm


def like_the_reference(model: nn.Module) -> None:
    """Plain operations and PyTorch's attention in place of our kernels, in the order in which the reference computes."""
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            module.kernel = "sdpa"
        if isinstance(module, Attention):
            module.forward = partial(_attention, module)  # type: ignore[method-assign]
        elif isinstance(module, TanhMlp):
            module.forward = partial(Mlp.forward, module)  # type: ignore[method-assign]


def _attention(attn: Attention, x: Tensor, rope: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
    """`Attention.forward` on tokens that are brought into its order first: `x [B, T, S, D]` -> the same."""
    B, T, _, _ = x.shape
    qkv = attn.qkv(rearrange(x, IN_ORDER[attn.axis]))
    q, k, v = rearrange(qkv, "M N (k H d) -> k M H N d", k=3, H=attn.num_heads)
    out = rearrange(attn.attend(q, k, v, rope), "M H N d -> M N (H d)")
    return rearrange(attn.proj(out), BACK[attn.axis], B=B, T=T)


class DiffusersModel(nn.Module):
    """A model of diffusers with the signature of ours.

    Args:
        theirs: a `LatteTransformer3DModel` or a `DiTTransformer2DModel`.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs
        self.takes_images = type(theirs).__name__ == "DiTTransformer2DModel"

    def forward(self, x: Tensor, timestep: Tensor, y: Tensor, **_: Tensor) -> Tensor:
        """`x [B, C, T, H, W]`, `timestep [B]`, `y [B, 1, L, C_text]` -> `[B, 2 C, T, H, W]` fp32."""
        weights = self.theirs.proj_out_2 if self.takes_images else self.theirs.proj_out
        H, W = x.shape[-2:]
        latent = F.pad(x, (0, W % 2, 0, H % 2)).to(weights.weight.dtype)  # ours counts a part of a patch too
        if self.takes_images:
            classes = torch.zeros(len(x), dtype=torch.long, device=x.device)
            out = self.theirs(latent[:, :, 0], timestep, classes).sample[:, :, None]
        else:
            out = self.theirs(latent, timestep, y[:, 0].to(latent.dtype)).sample
        return out[..., :H, :W].float()

    def transformer_blocks(self) -> list[nn.Module]:
        """All that is worth compiling."""
        return [*self.theirs.transformer_blocks, *getattr(self.theirs, "temporal_transformer_blocks", [])]


def diffusers_like(model: Any, latent: Sequence[int]) -> tuple[DiffusersModel, int]:
    """Diffusers' nearest model on the device that is set, and the FLOPs of its forward pass of one sample.

    Args:
        model: ours, a DiT or an STDiT, for width, heads and FLOPs.
        latent: frames, rows and columns.
    """
    y = model.null_condition(1)
    wanted = model.flops(tuple(latent), y.shape[2])
    with torch.device("meta"):
        x = torch.empty(1, model.in_channels, *latent)
        one, two = (
            _flops(_diffusers(model, latent, layers), x, torch.empty_like(y, device="meta")) for layers in (1, 2)
        )
    layers = max(1, round((wanted - one) / (two - one)) + 1)
    return DiffusersModel(_diffusers(model, latent, layers)), one + (layers - 1) * (two - one)


def _diffusers(model: Any, latent: Sequence[int], layers: int) -> Any:
    from diffusers import DiTTransformer2DModel, LatteTransformer3DModel

    heads = next(module.num_heads for module in model.modules() if isinstance(module, Attention))
    common = {
        "num_attention_heads": heads,
        "attention_head_dim": model.hidden_size // heads,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "num_layers": layers,
        "attention_bias": True,
        "sample_size": latent[1] + latent[1] % 2,
        "patch_size": model.patch_size[1],
        "activation_fn": "gelu-approximate",
        "norm_elementwise_affine": False,
    }
    if latent[0] == 1:
        return DiTTransformer2DModel(**common)
    return LatteTransformer3DModel(
        **common,
        cross_attention_dim=model.hidden_size,
        norm_type="ada_norm_single",
        norm_eps=1e-6,
        caption_channels=model.caption_channels,
        video_length=latent[0],
    )


def _flops(theirs: Any, x: Tensor, y: Tensor) -> int:
    """Of the forward pass, counted on tensors without content."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        DiffusersModel(theirs)(x, torch.empty(len(x), device=x.device), y)
    return counter.get_total_flops()
