"""The base of denoisers whose network is a class of diffusers: one file a family says how it is called.

The network stays diffusers' own, under the name `net`; weights go out under its own names, as a folder that diffusers loads. What this
package adds comes from outside, as for all denoisers: activation checkpointing, compilation, LoRA, sharding and sequence parallelism.

Text dropped in training, and guidance without a negative prompt, is the encoding of an empty prompt: these networks have no table of
"no text".
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from opensora.models.loading import Convert, load_weights, store_frozen

Size = tuple[int, int, int]


@contextmanager
def weights_on(device: torch.device | str | None, path: str | None) -> Iterator[None]:
    """Networks made inside have their initial weights on `device` (None = PyTorch's default).

    Those that are to be loaded from `path` have none: their parameters are on the meta device, where they take neither memory nor time,
    until `load_strictly` reads them. Buffers such as tables of positions, which no file has, are made all the same.
    """
    if path is None:
        with nullcontext() if device is None else torch.device(device):
            yield
        return
    register = nn.Module.register_parameter

    def register_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), param.requires_grad))

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class DiffusersDenoiser(nn.Module):
    """Obeys the contract of `opensora.models.denoiser.Denoiser`.

    Args:
        net: the network, whose `config` and state dict are diffusers'.
        patch_size: latent frames, rows and columns in one token.
        channels: of the latent, in and out.
        text_dim, text_len: channels and tokens of the text features.
        class_dropout_prob: how often training replaces the caption by the empty prompt.
    """

    blocks_name: ClassVar[str] = "transformer_blocks"
    micro_conditions: tuple[str, ...] = ()
    has_null_text = False
    sp_ranks: Any = None
    """See `Denoiser`."""

    def __init__(
        self,
        net: nn.Module,
        *,
        patch_size: Size,
        channels: int,
        text_dim: int,
        text_len: int,
        class_dropout_prob: float,
    ) -> None:
        super().__init__()
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob={class_dropout_prob} is not in [0, 1).")
        self.net: Any = net
        self.patch_size, self.in_channels, self.out_channels = patch_size, channels, channels
        self.text_dim, self.text_len, self.class_dropout_prob = text_dim, text_len, class_dropout_prob

    def load(self, path: str | None, convert: Convert, frozen_weights: str = "fp32") -> None:
        """Load `from_pretrained`, if any, straight into the dtypes of `frozen_weights`; see `load_weights` and `store_frozen`."""
        self.from_pretrained = path
        store_frozen(self, frozen_weights)
        if path is not None:
            load_weights(self, path, convert)
        lacking = [name for name, parameter in self.named_parameters() if path is not None and parameter.is_meta]
        assert not lacking, f"neither loaded nor initialised: {lacking}"

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return list(getattr(self.net, self.blocks_name))

    def null_condition(self, batch: int) -> Tensor:
        """Zeros [batch, 1, L, C]: where the encoding of the empty prompt goes."""
        return torch.zeros(batch, 1, self.text_len, self.text_dim)

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Denoiser.to_diffusers`."""
        if options:
            raise TypeError(f"{type(self).__name__} has no options: {sorted(options)}")
        config = {key: value for key, value in self.net.config.items() if not key.startswith("_")}
        state = {name.removeprefix("net."): value for name, value in self.state_dict().items()}
        return {"_class_name": type(self.net).__name__, **config}, state

    def grid(self, latent_size: Sequence[int]) -> Size:
        """See `Denoiser.grid`."""
        T, H, W = (-(-n // p) for n, p in zip(latent_size, self.patch_size, strict=True))
        return T, H, W

    def pad_to_patches(self, x: Tensor) -> Tensor:
        """`x [B, C, T, H, W]`, with zeros up to whole patches."""
        missing = [-n % p for n, p in zip(x.shape[2:], self.patch_size, strict=True)]
        return F.pad(x, (0, missing[2], 0, missing[1], 0, missing[0])) if any(missing) else x

    def unpatchify(self, x: Tensor, latent_size: Sequence[int]) -> Tensor:
        """Tokens `x [B, N, patch * C] -> [B, C, *latent_size]` fp32, of which padding is cropped."""
        sizes = dict(zip(("T", "H", "W"), self.grid(latent_size), strict=True))
        sizes |= dict(zip(("pt", "ph", "pw"), self.patch_size, strict=True))
        x = rearrange(x, "B (T H W) (pt ph pw C) -> B C (T pt) (H ph) (W pw)", **sizes)
        return x[:, :, : latent_size[0], : latent_size[1], : latent_size[2]].float()

    def own_tokens(self, x: Tensor) -> Tensor:
        """`[B, N, ...]` -> this process' share of the N tokens, where `sp_ranks` shares them; else all of them."""
        return x if self.sp_ranks is None else self.sp_ranks.split(x.unsqueeze(1)).squeeze(1)

    def text(self, y: Tensor, mask: Tensor | None, length: int) -> Tensor:
        """`y [B, 1, L, C]` -> fp32 [B, length, C], zeros where `mask [B, L]` is False and behind the last token."""
        y = y[:, 0].float()
        if y.shape[1] > length:
            raise ValueError(f"a text of {y.shape[1]} tokens; the network takes {length}.")
        if mask is not None:
            y = y * mask.bool().unsqueeze(-1)
        return F.pad(y, (0, 0, 0, length - y.shape[1]))
