"""What every VAE here promises, and the parts they share.

    moments(x) -> sample(moments) -> decode(z, num_frames)        encode(x) = sample(moments(x))

A VAE says how many frames and which sizes it takes, and scales its latents by its own config, so that no other file knows
a number of it:

    z_scaled = (z - shift) * scale,  shift = shift_factor or latents_mean,  scale = scaling_factor [/ latents_std]

Where `latents_mean` and `latents_std` are present, `shift_factor` is ignored. A VAE is built trainable; who only uses it calls
`vae.requires_grad_(False).eval()`.
"""

import hashlib
import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.vae_slicing import (
    LOGVAR_RANGE,
    Generators,
    autocast_to,
    images_at_a_time,
    per_frame,
    scale_and_shift,
    to_channels_last,
)
from opensora.models.vae.splitting import check_tile_size, tiled
from opensora.registry import inherit_signature
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

Posterior = Literal["sample", "mode"]
MemoryFormat = Literal["contiguous", "channels_last"]

STATISTICS = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
LARGEST_INPUT = 10.0  # far outside [-1, 1]: only pixels of 0..255 are


class VideoVAE(nn.Module):
    """The contract and the shared parts.

    A subclass calls `__init__`, builds its network, sets `out_channels` and `strides`, then calls `_ready`. It implements
    `_encode` and `_decode`, and, where any number of frames from 1 is not legal or latent frames are not the rounded up
    quotient by the stride, `latent_frames`, `video_frames` and `legal_num_frames`. The registry lists the arguments of the base
    class for its `**options`.

    Args:
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        micro_batch_size: At most so many go through the network at a time: frames for VAEs that work frame by frame, videos
            for the others. None: all at once.
        dtype: Of the weights, and so of the computation outside autocast. Files may hold any.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile encoder and decoder for the sizes that they meet. With `micro_batch_size`, the last, smaller
            micro-batch is filled up, so that there is one size.
    """

    in_channels: int = 3  # of the video; others for VAEs that work on another VAE's latents
    out_channels: int  # of the latents
    strides: tuple[int, int, int]  # pixels (frames, height, width) of a latent cell
    cells: tuple[int, int] = (1, 1)  # of the denoiser's patches: sizes are multiples of so many latent cells
    encodes_frames: bool = False  # every frame by itself: the network gets [N, C, H, W]
    decodes_frames: bool = False
    # fp32 on the CPU, [C], or [C, t] where each latent frame has its own; no buffers, for `.to(bf16)` must not round them
    scaling_factor: Tensor
    shift: Tensor
    tile_size: int | None = None
    tile_overlap: float = 0.25
    frames_rule: str = "it takes any number from 1"  # the legal numbers of frames in words, for messages

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherit_signature(cls)

    def __init__(
        self,
        *,
        posterior: Posterior = "sample",
        micro_batch_size: int | None = None,
        dtype: str | torch.dtype = "fp32",
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self._check_choice("posterior", posterior, get_args(Posterior))
        self._check_choice("memory_format", memory_format, get_args(MemoryFormat))
        if micro_batch_size is not None and micro_batch_size < 1:
            raise self._error(f"micro_batch_size={micro_batch_size}; use a positive number or None.")
        self.posterior = posterior
        self.micro_batch_size = micro_batch_size
        self._dtype = to_torch_dtype(dtype)
        self.memory_format = memory_format
        self.compiled = compile
        self.config: dict[str, Any] = {}  # what the weights belong to, with `STATISTICS`; JSON values
        self._checked_range = False
        self._placed: tuple[Tensor, ...] = ()

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """x [N, 3, T, H, W] -> raw moments [N, 2C, t, h, w], for a micro-batch and one tile."""

    @abstractmethod
    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        """Raw latents z [N, C, t, h, w] -> x [N, 3, num_frames, H, W], for a micro-batch and one tile."""

    def latent_frames(self, num_frames: int) -> int:
        """How many latent frames a video of a legal number of frames has."""
        return -(-num_frames // self.strides[0])

    def video_frames(self, latent_frames: int) -> int:
        """The number of frames of the longest video with so many latent frames."""
        return latent_frames * self.strides[0]

    def legal_num_frames(self, num_frames: int) -> int:
        """The nearest number of frames that the VAE takes; of two equally near ones the smaller."""
        return max(int(num_frames), 1)

    @property
    def chunk_latent_frames(self) -> int | None:
        """Latent frames of a chunk that is encoded by itself, where other latents may join on; None: a video is one."""
        return 1 if self.encodes_frames else None

    def _network(self) -> nn.Module:
        """The module with `encoder` and `decoder`."""
        return self

    def _config(self) -> Mapping[str, Any]:
        return self.config

    def _write_config(self, **values: Any) -> None:
        self.config.update(values)

    def _input_dtype(self, *, decoding: bool) -> torch.dtype:
        """What the network is given its input in."""
        return next(self._network().parameters()).dtype

    def _latent_settings(self) -> dict[str, Any]:
        """Settings besides `_config` that change latents, where they are not the default; tiles change them hardly."""
        return {}

    def forward(self, x: Tensor, generators: Generators = None) -> tuple[Tensor, Tensor]:
        """Reconstruct, for training the VAE: x [B, 3, T, H, W] -> (x_hat [B, 3, T, H, W], moments [B, 2C, t, h, w])."""
        moments = self.moments(x)
        return self.decode(self.sample(moments, generators), x.shape[2]), moments

    def encode(self, x: Tensor, generators: Generators = None) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> scaled latents z [B, C, t, h, w] fp32.

        `generators`: one per sample, for the posterior; None draws from torch's own (not reproducible).
        """
        return self.sample(self.moments(x), generators)

    def moments(self, x: Tensor) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> raw mean and log variance [B, 2C, t, h, w] fp32; errors as `latent_size`."""
        if x.dim() != 5 or x.shape[1] != self.in_channels:
            raise ValueError(f"the VAE takes [B, {self.in_channels}, T, H, W], got {tuple(x.shape)}")
        self.latent_size((x.shape[2], x.shape[3], x.shape[4]))
        self._check_range(x)
        return self._run(self._encode, x, self.micro_batch_size, decoding=False)

    def sliced_moments(
        self,
        x: Tensor,
        micro_bs: int | None = None,
        use_autocast: bool | torch.dtype = False,  # noqa: FBT001, FBT002  (as `sliced_vae`)
        nhwc: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        """`moments` in micro-batches of `micro_bs` frames, also of its parts; None: the VAE's own, or by the frames' size."""
        frames = micro_bs or images_at_a_time(x.shape[3], x.shape[4])
        parts = [part for part in self.modules() if isinstance(part, VideoVAE)]
        before = [(part.micro_batch_size, part.memory_format) for part in parts]
        for part in parts:
            if micro_bs is not None or part.micro_batch_size is None:
                part.micro_batch_size = frames if part.encodes_frames else max(frames // x.shape[2], 1)
            if nhwc:
                part.memory_format = "channels_last"
        try:
            with autocast_to(x.device, use_autocast):
                return self.moments(x)
        finally:
            for part, (size, memory_format) in zip(parts, before, strict=True):
                part.micro_batch_size, part.memory_format = size, memory_format

    def sample(self, moments: Tensor, generators: Generators = None) -> Tensor:
        """moments [B, 2C, t, h, w] -> scaled latents z [B, C, t, h, w] fp32, drawn from the posterior or its mode."""
        z, logvar = moments.float().chunk(2, dim=1)
        if self.posterior == "sample":
            z = z + (0.5 * logvar.clamp(*LOGVAR_RANGE)).exp() * randn_like(z, generators)
        return self._scaled(z)

    def mode(self, moments: Tensor) -> Tensor:
        """moments [B, 2C, t, h, w] -> scaled latents z [B, C, t, h, w] fp32: the posterior's mode, whatever `posterior` is."""
        return self._scaled(moments.float().chunk(2, dim=1)[0])

    def _scaled(self, z: Tensor) -> Tensor:
        scale, shift = self._statistics_at(z.device)
        return (z - per_frame(shift, z)) * per_frame(scale, z)

    def decode(self, z: Tensor, num_frames: int | None = None) -> Tensor:
        """Scaled latents z [B, C, t, h, w] -> x [B, 3, T, H, W] fp32, in [-1, 1] but for the network's error.

        `num_frames` is T; None means the longest video with that many latent frames.
        """
        latent_frames = z.shape[2]
        num_frames = self.video_frames(latent_frames) if num_frames is None else int(num_frames)
        needed = self.latent_frames(num_frames)
        if needed != latent_frames:
            raise ValueError(f"num_frames={num_frames}, but the latents hold {latent_frames} frames; it takes {needed}")
        scale, shift = self._statistics_at(z.device)
        z = z.float() / per_frame(scale, z) + per_frame(shift, z)
        size = self.micro_batch_size
        if size and self.encodes_frames and not self.decodes_frames:
            size = 1  # a video is more than a micro-batch of frames
        return self._run(lambda part: self._decode(part, num_frames), z, size, decoding=True)

    def legal_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """The nearest (T, H, W) that the VAE takes."""
        height, width = (max(round(n / by), 1) * by for n, by in zip(size[1:], self._sides(), strict=True))
        return self.legal_num_frames(size[0]), height, width

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """(T, H, W) of a video -> (t, h, w) of its latents; a UserError with the nearest size where the VAE takes no such."""
        frames, height, width = (int(n) for n in size)
        legal, *near = self.legal_size(size)
        if near != [height, width]:
            by_height, by_width = self._sides()
            multiples = f"{by_height}" if by_height == by_width else f"{by_height} (height) and {by_width} (width)"
            raise UserError(
                f"the VAE cannot encode {height}x{width} (height x width) with {frames} frames: sizes are multiples of "
                f"{multiples}; the nearest is {near[0]}x{near[1]}."
            )
        if legal != frames:
            raise UserError(f"the VAE cannot encode {frames} frames: {self.frames_rule}; the nearest is {legal}.")
        return self.latent_frames(frames), height // self.strides[1], width // self.strides[2]

    def _sides(self) -> tuple[int, int]:
        """Of what height and width are multiples."""
        return self.strides[1] * self.cells[0], self.strides[2] * self.cells[1]

    def causal_padding(self, num_frames: int) -> int:
        """How many frames are missing in front of a chunk of `num_frames` to fill its first latent frame."""
        return self.strides[0] * self.latent_frames(num_frames) - num_frames

    def legal_num_frames_within(self, num_frames: int) -> int:
        """The most frames that the VAE takes and that `num_frames` hold; where there are none, the fewest it takes."""
        legal = map(self.legal_num_frames, range(num_frames, 0, -1))
        return next((n for n in legal if n <= num_frames), self.legal_num_frames(1))

    def legal_num_frames_over(self, num_frames: int) -> int:
        """The fewest frames that the VAE takes and that are no fewer than `num_frames`."""
        return next(n for n in map(self.legal_num_frames, itertools.count(num_frames)) if n >= num_frames)

    @property
    def last_layer(self) -> nn.Parameter:
        """The kernel of the decoder's last convolution, where gradients of a loss and of a discriminator are compared."""
        decoder: Any = self._network().decoder
        return [parameter for parameter in decoder.parameters() if parameter.dim() >= 4][-1]

    def fingerprint(self) -> str:
        """A hash of config and weights, then the settings that change latents, so that a cache that is refused says which."""
        config = {key: value for key, value in self._config().items() if not key.startswith("_")}
        digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=list).encode(), digest_size=16)
        for name, weight in sorted(self._network().state_dict().items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy())
        settings = [
            f"{name}.{key}={value}".lstrip(".")  # a VAE is a module of its own, by the name ""
            for name, part in self.named_modules()
            if isinstance(part, VideoVAE)
            for key, value in part._latent_settings().items()
        ]
        return " ".join([digest.hexdigest(), *settings])

    def set_latent_statistics(self, **statistics: float | Sequence[float] | None) -> None:
        """Change `scaling_factor`, `shift_factor`, `latents_mean` or `latents_std` of the config and apply it."""
        if unknown := statistics.keys() - set(STATISTICS):
            raise self._error(f"no statistic {sorted(unknown)}; there are {', '.join(STATISTICS)}.")
        if statistics:
            self._write_config(**statistics)
        self.scaling_factor, self.shift = scale_and_shift(self._config(), self.out_channels, whose=type(self).__name__)

    def _ready(self) -> None:
        """The last step of a constructor: dtype, layout, statistics, compilation."""
        network: Any = self._network()
        if self.tile_size is not None:
            check_tile_size(self.tile_size, self.strides[1:])
        self.to(self._dtype)
        if self.memory_format == "channels_last":
            to_channels_last(network)
        self.set_latent_statistics()
        if self.compiled:
            network.encoder.compile()
            network.decoder.compile()

    def _run(self, network: Callable[[Tensor], Tensor], x: Tensor, size: int | None, *, decoding: bool) -> Tensor:
        """`network` over x [B, C, T, H, W], in micro-batches of `size` videos or frames, each in tiles."""
        by_frame = self.decodes_frames if decoding else self.encodes_frames
        units = rearrange(x, "B C T H W -> (B T) C H W") if by_frame else x
        parts = []
        for part in units.to(self._input_dtype(decoding=decoding)).split(size or len(units)):
            filled = part
            if self.compiled and size and len(part) < size:  # one size, one program
                filled = torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])
            laid_out = lambda tile: network(self._layout(tile))  # noqa: E731
            out = tiled(laid_out, filled, self.tile_size, self.tile_overlap, self.strides[1:], decoding=decoding)
            parts.append(out[: len(part)] if len(out) > len(part) else out)
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
        return (rearrange(out, "(B T) C H W -> B C T H W", B=len(x)) if by_frame else out).float()

    def _layout(self, x: Tensor) -> Tensor:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last if self.memory_format == "channels_last" else torch.contiguous_format)

    def _check_range(self, x: Tensor) -> None:
        """Refuse pixels of 0..255; looked at once, for it waits for the device."""
        if not x.is_floating_point():
            raise UserError(f"the VAE takes pixels in [-1, 1]; these are {x.dtype}: divide by 127.5 and subtract 1.")
        if not self._checked_range and self.in_channels == 3 and not torch.compiler.is_compiling():
            largest = float(x.detach().abs().max())
            if largest > LARGEST_INPUT:
                raise UserError(f"the VAE takes pixels in [-1, 1]; these reach {largest:.4g}. Were they in 0..255?")
            self._checked_range = True

    def _statistics_at(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`scaling_factor` and `shift` on a device; copied there once, for the host waits for such a copy."""
        own = (self.scaling_factor, self.shift)
        current = self._placed and all(a is b for a, b in zip(self._placed[:2], own, strict=True))
        if not current or self._placed[2].device != device:
            self._placed = (*own, *(tensor.to(device) for tensor in own))
        return self._placed[2], self._placed[3]

    def _check_choice(self, name: str, value: str, choices: Sequence[str]) -> None:
        if value not in choices:
            raise self._error(f"{name}={value!r} is not one of {', '.join(choices)}.")

    def _error(self, text: str) -> UserError:
        return UserError(f"{type(self).__name__}: {text}")
