"""What all denoisers share: the contract, the latent's way into tokens and back, and what older configs may pass.

A denoiser obeys architecture.md's contract whatever is inside, so that any of them trains and samples with any
scheduler. It draws nothing at random, knows no process group, and treats the samples of a batch apart.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.models.layers.embedders import PatchEmbed3D, ScalarEmbedder
from opensora.utils.errors import UserError

Size = tuple[int, int, int]


NUMBERS = ("fps", "height", "width", "num_frames")
"""What every denoiser may be told of a video, [B] each."""


class SequenceRanks(Protocol):
    """How tokens lie in several processes; see `opensora.acceleration.sequence_parallel`."""

    def split(self, x: Tensor) -> Tensor:
        """This process' part of the places of all tokens `x [B, T, S, D]`."""

    def gather(self, x: Tensor, num_tokens: int) -> Tensor:
        """All tokens `[B, T, num_tokens, ...]` from the parts `x` of all processes."""


class Denoiser(nn.Module, ABC):
    """Base of all denoisers. Names: `x_embedder`, `t_embedder`.

    Args:
        in_channels: channels of the latent.
        predicts_sigma: the output has `2 * in_channels` channels (prediction and variance) instead of `in_channels`.
        hidden_size: width D of the tokens.
        patch_size: latent frames, rows and columns in one token.
        class_dropout_prob: how often training drops the caption or class.
        input_size: accepted from older configs, (T, H, W) of the latent; positions follow the input.
    """

    numbers: tuple[str, ...] = NUMBERS
    """The numbers that training and sampling give to `forward`."""

    sp_ranks: SequenceRanks | None = None
    """Set from outside where the tokens of a sample are spread over processes; None = all are here."""

    def __init__(
        self,
        *,
        in_channels: int,
        predicts_sigma: bool,
        hidden_size: int,
        patch_size: Sequence[int],
        class_dropout_prob: float,
        input_size: Sequence[int | None] | None,
    ) -> None:
        super().__init__()
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob={class_dropout_prob} is not in [0, 1).")
        if len(patch_size) != 3 or min(patch_size) < 1:
            raise ValueError(f"patch_size={patch_size!r}: expected (frames, rows, columns), each at least 1.")
        if input_size is not None and len(input_size) != 3:
            raise ValueError(f"input_size={input_size!r}: expected (T, H, W) of the latent, or leave it out.")
        self.in_channels = in_channels
        self.out_channels = 2 * in_channels if predicts_sigma else in_channels
        self.hidden_size = hidden_size
        self.patch_size: Size = (patch_size[0], patch_size[1], patch_size[2])
        self.class_dropout_prob = class_dropout_prob
        self.input_size = input_size
        self.x_embedder = PatchEmbed3D(self.patch_size, in_channels, hidden_size)
        self.t_embedder = ScalarEmbedder(hidden_size)

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        *,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        fps: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        num_frames: Tensor | None = None,
    ) -> Tensor:
        """Predict noise (or v, or x_0) from a noisy latent.

        Args:
            x: latent [B, C, T, H, W], any size.
            timestep: [B], integers or floats in [0, 1000].
            y: text features [B, 1, L, C_text], or class numbers [B, 1, 1, 1].
            mask: [B, L] bool, True at real text tokens; None = all.
            x_mask: [B, T] bool, True at latent frames being denoised; the others count as clean. None = all.
            fps, height, width, num_frames: [B], the video's frame rate and its size in pixels and frames.

        Returns:
            [B, C_out, T, H, W] fp32.
        """

    @abstractmethod
    def null_condition(self, batch: int) -> Tensor:
        """The `y` of "no text" or "no class"."""

    @abstractmethod
    def transformer_blocks(self) -> list[nn.Module]:
        """The blocks in forward order, for compilation, activation checkpointing and sharding."""

    @abstractmethod
    def flops(self, latent_size: Size, text_len: int) -> int:
        """Floating-point operations (2 per multiply-add, matrix products only) of one forward of one sample."""

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The same model in diffusers: the content of its config.json, with the class's name, and its state dict.

        Args:
            options: what diffusers' model fixes and ours does not, such as its `sample_size`; see the architecture's
                weights.py.

        Raises:
            UserError: diffusers has no such architecture, or it cannot express this model.
        """
        raise UserError(f"diffusers has no {type(self).__name__}: keep its weights as safetensors.")

    def grid(self, latent_size: Sequence[int]) -> Size:
        """Patches along time, height and width for a latent of `latent_size`; a part of a patch counts as one."""
        T, H, W = (-(-n // p) for n, p in zip(latent_size, self.patch_size, strict=True))
        return T, H, W

    def patchify(self, x: Tensor) -> Tensor:
        """Latent `[B, C, T, H, W] -> [B, T', S, D]` tokens, without positions, contiguous.

        As a view they would keep the convolution's layout, channels first, through all residual sums of all blocks.
        """
        self._check_latent(x)
        return rearrange(self.x_embedder(x), "B D T H W -> B T (H W) D").contiguous()

    def enter_blocks(self, x: Tensor) -> Tensor:
        """Tokens `x [B, T', S, D]` with their spatial positions -> those that this process works on, until `unpatchify`."""
        return x if self.sp_ranks is None else self.sp_ranks.split(x)

    def unpatchify(self, x: Tensor, latent_size: Sequence[int]) -> Tensor:
        """`x [B, T', S, patch * C] -> [B, C, *latent_size]` fp32; padding is cut off.

        Where the tokens are spread over processes, `x` is a part of them, and each process gets the whole result.
        """
        pt, ph, pw = self.patch_size
        _, H, W = self.grid(latent_size)
        if self.sp_ranks is not None:
            x = self.sp_ranks.gather(x, H * W)
        x = rearrange(
            x, "B T (H W) (pt ph pw C) -> B C (T pt) (H ph) (W pw)", H=H, W=W, pt=pt, ph=ph, pw=pw
        )  # the channel is the fastest axis of a token's output, as in DiT
        return x[:, :, : latent_size[0], : latent_size[1], : latent_size[2]].float()

    def patch_mask(self, x_mask: Tensor | None) -> Tensor | None:
        """`x_mask [B, frames] -> [B, T']`: a patch of several frames is denoised when any of its frames is."""
        pt = self.patch_size[0]
        if x_mask is None or pt == 1:
            return x_mask
        frames = x_mask.shape[1]
        padded = x_mask.new_zeros(len(x_mask), -(-frames // pt) * pt)
        padded[:, :frames] = x_mask
        return rearrange(padded, "B (T pt) -> B T pt", pt=pt).any(dim=2)

    def embed_flops(self, latent_size: Size) -> int:
        """Floating-point operations of the patch embedding, the timestep's MLP and the final linear layer."""
        T, H, W = self.grid(latent_size)
        pt, ph, pw = self.patch_size
        patches = T * H * W * pt * ph * pw * (self.in_channels + self.out_channels) * self.hidden_size
        return 2 * (patches + self.t_embedder.num_frequencies * self.hidden_size + self.hidden_size**2)

    def _check_latent(self, x: Tensor) -> None:
        if x.ndim != 5 or x.shape[1] != self.in_channels:
            raise ValueError(f"the latent has shape {tuple(x.shape)}; expected [B, {self.in_channels}, T, H, W].")
        expected = self.input_size
        if expected is not None and any(n is not None and n != m for n, m in zip(expected, x.shape[2:], strict=True)):
            warnings.warn(
                f"input_size={tuple(expected)} is not the size of the latent, {tuple(x.shape[2:])}: positions follow "
                "the latent. Drop input_size from the config.",
                stacklevel=3,
            )
            self.input_size = None


def train_only(model: nn.Module, trained: Callable[[str], bool]) -> None:
    """Freeze every parameter whose name `trained` rejects.

    Raises:
        ValueError: nothing would be trained.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("this choice of frozen parts leaves nothing to train.")


def required(value: Tensor | None, name: str, model: nn.Module) -> Tensor:
    """A condition that the model cannot do without, in fp32 [B].

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError(f"{type(model).__name__} needs {name}=: a tensor [B].")
    return value.to(torch.float32)
