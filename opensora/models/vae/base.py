"""What every VAE here promises (architecture D5), and the parts they share.

    moments(x) -> sample(moments) -> decode(z, num_frames)        encode(x) = sample(moments(x))

A VAE says how many frames and which sizes it takes, and scales its latents by its own config, so that no other file knows
a number of it:

    z_scaled = (z - shift) * scale,  shift = shift_factor or latents_mean,  scale = scaling_factor [/ latents_std]

Where `latents_mean` and `latents_std` are present they are used together with `scaling_factor`, and `shift_factor` is
ignored. A class implements `_encode`, `_decode` and its lengths; micro-batches, tiles, the posterior, the scaling and the
checks are here. A VAE is built trainable; who only uses it says so: `vae.requires_grad_(False).eval()`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from opensora.acceleration.vae_slicing import LOGVAR_RANGE, Generators, per_frame, scale_and_shift, to_channels_last
from opensora.models.vae.tiling import Tiles, tiled
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

Posterior = Literal["sample", "mode"]
MemoryFormat = Literal["contiguous", "channels_last"]
Network = Callable[[Tensor], Tensor]

STATISTICS = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
LARGEST_INPUT = 10.0  # far outside [-1, 1]: only pixels of 0..255 are


class VideoVAE(nn.Module):
    """The shared parts. A subclass calls `__init__`, builds its network, then `_ready`.

    Attributes:
        in_channels: Of the video: 3, but for VAEs that work on another VAE's latents.
        out_channels: Of the latents.
        strides: Pixels (frames, height, width) of a latent cell.
        scaling_factor, shift: fp32 on the CPU, [C], or [C, t] where each latent frame has its own. They are no buffers,
            for `.to(bf16)` must not round them.
        micro_batch_size: At most so many units go through the network at a time; a unit is a frame for VAEs that work
            frame by frame, a video for the others. None: all at once.

    Args:
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        micro_batch_size: See above.
        tile_size: Encode and decode pictures larger than this (pixels, height and width) in overlapping square tiles.
        tile_overlap: The overlap of neighbouring tiles, as a part of a tile. Its middle half blends from one to the other.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile encoder and decoder for the sizes that they meet. With `micro_batch_size`, the last, smaller
            micro-batch is filled up, so that there is one size.
    """

    in_channels: int = 3
    out_channels: int
    strides: tuple[int, int, int]
    scaling_factor: Tensor
    shift: Tensor

    def __init__(
        self,
        *,
        posterior: Posterior = "sample",
        micro_batch_size: int | None = None,
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self._one_of("posterior", posterior, get_args(Posterior))
        self._one_of("memory_format", memory_format, get_args(MemoryFormat))
        if micro_batch_size is not None and micro_batch_size < 1:
            raise self._complaint(f"micro_batch_size={micro_batch_size}; use a positive number or None.")
        if not 0 <= tile_overlap <= 0.5:
            raise self._complaint(f"tile_overlap={tile_overlap}; use a part of a tile from 0 to 0.5.")
        self.posterior = posterior
        self.micro_batch_size = micro_batch_size
        self.tile_size = tile_size
        self.tile_overlap = tile_overlap
        self.memory_format = memory_format
        self.compiled = compile
        self._checked_range = False
        self._placed: tuple[Tensor, ...] = ()

    # ------------------------------------------------------------------------- what a subclass implements

    def _encode(self, x: Tensor) -> Tensor:
        """x [N, 3, T, H, W] -> raw moments [N, 2C, t, h, w], for a micro-batch of units and one tile."""
        raise NotImplementedError

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        """Raw latents z [N, C, t, h, w] -> x [N, 3, num_frames, H, W], for a micro-batch of units and one tile."""
        raise NotImplementedError

    def latent_frames(self, num_frames: int) -> int:
        """How many latent frames a video of a legal number of frames has."""
        raise NotImplementedError

    def video_frames(self, latent_frames: int) -> int:
        """The number of frames of the longest video with so many latent frames."""
        raise NotImplementedError

    def legal_num_frames(self, num_frames: int) -> int:
        """The nearest number of frames that the VAE takes; of two equally near ones the smaller."""
        raise NotImplementedError

    @property
    def chunk_latent_frames(self) -> int | None:
        """Latent frames of a piece that the VAE encodes and decodes by itself; None: a video is one piece.

        Latents of another video fit into a video where one of its pieces begins, and nowhere else.
        """
        return None

    def lead(self, num_frames: int) -> int:
        """How many frames the first latent frame of a piece of `num_frames` stands for; each other one stands for `strides[0]`.

        Latents of a piece mean the same frames in a piece of another length only where both leads are equal.
        """
        return num_frames - self.strides[0] * (self.latent_frames(num_frames) - 1)

    def units_of(self, pictures: int, num_frames: int) -> int:
        """The micro-batch that holds about so many pictures, for videos of `num_frames`: videos, unless a subclass differs."""
        return max(pictures // num_frames, 1)

    def _network(self) -> nn.Module:
        """The module with `encoder` and `decoder`."""
        raise NotImplementedError

    def _config(self) -> Mapping[str, Any]:
        """What the weights belong to, with the latents' statistics (`STATISTICS`); JSON values."""
        raise NotImplementedError

    def _write_config(self, **values: Any) -> None:
        """Change entries of `_config`."""
        raise NotImplementedError

    def _units(self, x: Tensor, *, decoding: bool) -> Tensor:
        """[B, C, T, H, W] -> [N, C, T', H, W]: what micro-batches are cut from. A video, unless a subclass differs."""
        return x

    def _videos(self, units: Tensor, batch: int, *, decoding: bool) -> Tensor:
        """The reverse of `_units`."""
        return units

    def _decoding_batch(self) -> int | None:
        """How many units are decoded at a time."""
        return self.micro_batch_size

    def _input_dtype(self, *, decoding: bool) -> torch.dtype:
        """What the network is given its input in: the weights' number format, unless a subclass differs."""
        return next(self._network().parameters()).dtype

    def _latent_settings(self) -> dict[str, Any]:
        """Settings beside `_config` with which latents are not those of the default; {} for the default.

        Tiles are none: latents of pictures within a tile are the same, those of larger ones nearly.
        """
        return {}

    # ------------------------------------------------------------------------------------- the contract

    def forward(self, x: Tensor, generators: Generators = None) -> tuple[Tensor, Tensor]:
        """Reconstruct, for training the VAE: x [B, 3, T, H, W] -> (x_hat [B, 3, T, H, W], moments [B, 2C, t, h, w])."""
        moments = self.moments(x)
        return self.decode(self.sample(moments, generators), x.shape[2]), moments

    def encode(self, x: Tensor, generators: Generators = None) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> scaled latents z [B, C, t, h, w] fp32.

        `generators`: one per sample, for the posterior; None draws from torch's own (not reproducible).
        """
        return self.sample(self.moments(x), generators)

    def moments(self, x: Tensor, *, micro_batch_size: int | None = None) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> raw mean and log variance [B, 2C, t, h, w] fp32.

        Args:
            x: Videos.
            micro_batch_size: In place of the VAE's own.

        Raises:
            UserError: The VAE takes no such size or number of frames, or the pixels are not in [-1, 1].
        """
        if x.dim() != 5 or x.shape[1] != self.in_channels:
            raise ValueError(f"the VAE takes [B, {self.in_channels}, T, H, W], got {tuple(x.shape)}")
        self.latent_size((x.shape[2], x.shape[3], x.shape[4]))
        self._check_range(x)
        return self._run(self._encode, x, micro_batch_size or self.micro_batch_size, decoding=False)

    def sliced_moments(
        self,
        x: Tensor,
        micro_bs: int | None = None,
        use_autocast: bool | torch.dtype = False,  # noqa: FBT001, FBT002  (as `sliced_vae`)
        nhwc: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        """`moments` in micro-batches, see `opensora.models.vae.slicing`."""
        from opensora.models.vae.slicing import sliced_moments  # which is made of VAEs

        return sliced_moments(self, x, micro_bs, use_autocast, nhwc)

    def sample(self, moments: Tensor, generators: Generators = None) -> Tensor:
        """moments [B, 2C, t, h, w] -> scaled latents z [B, C, t, h, w] fp32, drawn from the posterior or its mode."""
        z, logvar = moments.float().chunk(2, dim=1)
        if self.posterior == "sample":
            z = z + (0.5 * logvar.clamp(*LOGVAR_RANGE)).exp() * randn_like(z, generators)
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
        return self._run(lambda part: self._decode(part, num_frames), z, self._decoding_batch(), decoding=True)

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """(T, H, W) of a video -> (t, h, w) of its latents.

        Raises:
            UserError: The VAE takes no such size; the message names the nearest that it takes.
        """
        frames, height, width = (int(n) for n in size)
        _, by_height, by_width = self.strides
        if height % by_height or width % by_width or min(height, width) < 1:
            near = [max(round(n / by), 1) * by for n, by in ((height, by_height), (width, by_width))]
            multiples = f"{by_height}" if by_height == by_width else f"{by_height} (height) and {by_width} (width)"
            raise UserError(
                f"the VAE cannot encode {height}x{width} (height x width) with {frames} frames: sizes are multiples of "
                f"{multiples}; the nearest is {near[0]}x{near[1]}."
            )
        legal = self.legal_num_frames(frames)
        if legal != frames:
            raise UserError(f"the VAE cannot encode {frames} frames: {self.frames_rule}; the nearest is {legal}.")
        return self.latent_frames(frames), height // by_height, width // by_width

    @property
    def frames_rule(self) -> str:
        """The legal numbers of frames in words, for messages."""
        return "it takes any number from 1"

    def legal_num_frames_within(self, num_frames: int) -> int:
        """The most frames that the VAE takes and that `num_frames` hold; where there are none, the fewest it takes."""
        return next(
            (n for n in map(self.legal_num_frames, range(num_frames, 0, -1)) if n <= num_frames),
            self.legal_num_frames(1),
        )

    def legal_num_frames_over(self, num_frames: int) -> int:
        """The fewest frames that the VAE takes and that are no fewer than `num_frames`."""
        longer = num_frames
        while self.legal_num_frames(longer) < num_frames:
            longer += 1
        return self.legal_num_frames(longer)

    @property
    def last_layer(self) -> nn.Parameter:
        """The kernel of the decoder's last convolution, where gradients of a loss and of a discriminator are compared."""
        name = [key for key, p in self._network().decoder.named_parameters() if p.dim() >= 4][-1]  # type: ignore[union-attr]
        return self._network().decoder.get_parameter(name)  # type: ignore[union-attr]

    def fingerprint(self) -> str:
        """A hash of config and weights, and the settings that change latents: those cached under one fingerprint fit no other.

        The settings stand in it as they are, so that a cache that is refused for one of them says which.
        """
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
            raise self._complaint(f"no statistic {sorted(unknown)}; there are {', '.join(STATISTICS)}.")
        if statistics:
            self._write_config(**statistics)
        self.scaling_factor, self.shift = self._scale_and_shift(self._config())

    # ---------------------------------------------------------------------------------------- shared parts

    def _ready(self, dtype: torch.dtype, scaling_factor: float | None = None) -> None:
        """The last step of a constructor: number format, layout, statistics, compilation."""
        _, height, width = self.strides
        if self.tile_size is not None:
            Tiles(self.tile_size, self.tile_overlap, (height, width))  # refuses what it cannot cut
        self.to(dtype)
        if self.memory_format == "channels_last":
            to_channels_last(self._network())
        self.set_latent_statistics(**({} if scaling_factor is None else {"scaling_factor": scaling_factor}))
        if self.compiled:
            network = self._network()
            for part in (network.encoder, network.decoder):
                part.compile()  # type: ignore[union-attr]

    def _run(self, network: Network, x: Tensor, size: int | None, *, decoding: bool) -> Tensor:
        """`network` over units, micro-batches of `size` and tiles."""
        units = self._units(x, decoding=decoding).to(self._input_dtype(decoding=decoding))
        parts = [self._run_tiles(network, part, size, decoding=decoding) for part in units.split(size or len(units))]
        return self._videos(torch.cat(parts) if len(parts) > 1 else parts[0], len(x), decoding=decoding).float()

    def _run_tiles(self, network: Network, part: Tensor, size: int | None, *, decoding: bool) -> Tensor:
        missing = size - len(part) if self.compiled and size else 0
        if missing > 0:  # one size, one program
            part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
        if self.tile_size is None:
            out = network(part)
        else:
            cell = self.strides[1:]
            tiles = Tiles(self.tile_size, self.tile_overlap, cell)
            pixels, scale = (cell, cell) if decoding else ((1, 1), (1 / cell[0], 1 / cell[1]))
            out = tiled(network, part, tiles, pixels, scale)
        return out[: len(part) - missing] if missing > 0 else out

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

    def _scale_and_shift(self, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return scale_and_shift(config, self.out_channels, whose=type(self).__name__)

    def _one_of(self, name: str, value: str, choices: Sequence[str]) -> None:
        if value not in choices:
            raise self._complaint(f"{name}={value!r} is not one of {', '.join(choices)}.")

    def _complaint(self, text: str) -> UserError:
        return UserError(f"{type(self).__name__}: {text}")
