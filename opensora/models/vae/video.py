"""Diffusers' video VAEs, under one contract.

`FAMILIES` says what is particular about each class. The scale of latents is that of diffusers' pipelines; Cosmos' multiply by
their scheduler's `sigma_data` as well, which belongs to the scheduler.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import diffusers
import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.vae_slicing import LOGVAR_RANGE, scale_and_shift
from opensora.models.vae.vae import DiffusersVAE, parameters_of
from opensora.registry import MODELS
from opensora.utils.errors import UserError

Config = Mapping[str, Any]
Network = Callable[[Any, Tensor], Tensor]


def _encode(autoencoder: Any, x: Tensor) -> Tensor:
    return autoencoder.encode(x, return_dict=False)[0].parameters


def _decode(autoencoder: Any, z: Tensor) -> Tensor:
    return autoencoder.decode(z, return_dict=False)[0]


@dataclass(frozen=True)
class Family:
    """What is particular about one class of diffusers."""

    channels: str  # the config's key for the latent channels
    strides: Callable[[Config], tuple[int, int]]  # config -> frames, pixels a side of a latent cell
    step: Callable[[Config], int] | None = None  # legal numbers of frames are multiples, plus `first`; None: the stride
    first: int = 1  # where the first frame is encoded by itself; 0 where frames are taken in groups
    encode: Network = _encode  # (autoencoder, x) -> moments [B, 2C, t, h, w]
    decode: Network = _decode  # (autoencoder, z) -> x
    whole: bool = False  # wan_whole.py encodes and decodes all frames together, equal to the others but for rounding
    in_chunks: Literal["nothing", "decoder", "both"] = "nothing"  # may go through time in chunks, with other results
    fourier_pixels: bool = False  # the encoder begins with waves of the pixels, which must come in fp32
    one_at_a_time: bool = False  # the class fails for more than one video
    buffers: bool = False  # `latents_mean` and `latents_std` are tensors of the weights' file, not in the config


def _ratios(config: Config) -> tuple[int, int]:
    return int(config["temporal_compression_ratio"]), int(config["spatial_compression_ratio"])


def _ratio_and_levels(config: Config) -> tuple[int, int]:
    return int(config["temporal_compression_ratio"]), 2 ** (len(config["block_out_channels"]) - 1)


def _wan_strides(config: Config) -> tuple[int, int]:
    time = 2 ** sum(config["temperal_downsample"])
    if time > WAN_CHUNK:
        raise UserError(f"temperal_downsample={config['temperal_downsample']}: Wan's code encodes 4 frames at a time.")
    return time, 2 ** (len(config["dim_mult"]) - 1) * (config.get("patch_size") or 1)


def _wan_decode(autoencoder: Any, z: Tensor) -> Tensor:
    """As its `decode`, but not clamped to [-1, 1]: a clamped pixel has no gradient to come back by."""
    autoencoder.clear_cache()
    z = autoencoder.post_quant_conv(z)
    frames = []
    for t in range(z.shape[2]):
        autoencoder._conv_idx = [0]
        first = {"first_chunk": True} if t == 0 and isinstance(autoencoder, diffusers.AutoencoderKLWan) else {}
        frames.append(
            autoencoder.decoder(
                z[:, :, t : t + 1], feat_cache=autoencoder._feat_map, feat_idx=autoencoder._conv_idx, **first
            )
        )
    autoencoder.clear_cache()
    x = torch.cat(frames, dim=2)
    patch = autoencoder.config.get("patch_size") or 1
    return rearrange(
        x, "B (C q p) T H W -> B C T (H p) (W q)", p=patch, q=patch
    )  # columns before rows, as Wan 2.2 has them


def _code(autoencoder: Any, x: Tensor) -> Tensor:
    """Moments of an autoencoder without a posterior: its code, with the smallest variance that is kept."""
    mean = autoencoder.encode(x, return_dict=False)[0].mode()
    return torch.cat([mean, torch.full_like(mean, LOGVAR_RANGE[0])], dim=1)


def _allegro_encode(autoencoder: Any, x: Tensor) -> Tensor:
    """The network itself: diffusers' `encode` has it in tiles of 24 frames only."""
    return _by_frame(autoencoder.quant_conv, autoencoder.encoder(x))


def _allegro_decode(autoencoder: Any, z: Tensor) -> Tensor:
    return autoencoder.decoder(_by_frame(autoencoder.post_quant_conv, z))


def _by_frame(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return rearrange(layer(rearrange(x, "B C T H W -> (B T) C H W")), "(B T) C H W -> B C T H W", B=len(x))


def _cast_to_weights(layer: nn.Linear, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before Mochi's first layer."""
    return (inputs[0].to(layer.weight.dtype),)


def _ltx_strides(config: Config) -> tuple[int, int]:
    """From the layers: `spatial_compression_ratio`, where the config has one, is for diffusers' own tiles."""
    time, space = int(config["patch_size_t"]), int(config["patch_size"])
    for halved, kind in zip(config["spatio_temporal_scaling"], config["downsample_type"], strict=False):
        time *= 2 if halved and kind != "spatial" else 1
        space *= 2 if halved and kind != "temporal" else 1
    return time, space


def _ltx_decode(autoencoder: Any, z: Tensor) -> Tensor:
    """At decode timestep 0, as its pipeline does by default, where the decoder is conditioned on one."""
    temb = z.new_zeros(len(z)) if autoencoder.config["timestep_conditioning"] else None
    if not any(autoencoder.config["decoder_inject_noise"]):
        return autoencoder.decode(z, temb, return_dict=False)[0]
    with torch.random.fork_rng([z.device] if z.is_cuda else []):  # its decoder draws from the global generator
        torch.manual_seed(0)
        return autoencoder.decode(z, temb, return_dict=False)[0]


OF_NOVA = "AutoencoderKLOpenSora"
WAN_CHUNK = 4  # frames that Wan's `encode` takes at a time after the first, whatever the stride
LTX = Family("latent_channels", _ltx_strides, decode=_ltx_decode, in_chunks="both", buffers=True)
FAMILIES: dict[str, Family] = {
    "AutoencoderKLWan": Family("z_dim", _wan_strides, step=lambda _: WAN_CHUNK, decode=_wan_decode, whole=True),
    "AutoencoderKLQwenImage": Family("z_dim", _wan_strides, step=lambda _: WAN_CHUNK, decode=_wan_decode),
    "AutoencoderKLHunyuanVideo": Family("latent_channels", _ratios, in_chunks="both"),
    # its attention takes the batch of its mask for heads (diffusers 0.42)
    "AutoencoderKLHunyuanVideo15": Family("latent_channels", _ratios, one_at_a_time=True),
    # two latent frames are decoded at a time, and only an odd number keeps the first frame apart
    "AutoencoderKLCogVideoX": Family(
        "latent_channels", _ratio_and_levels, step=lambda config: 2 * int(config["temporal_compression_ratio"])
    ),
    "AutoencoderKLLTXVideo": LTX,
    "AutoencoderKLLTX2Video": LTX,
    # its encoder's attention looks at all frames
    "AutoencoderKLMochi": Family(
        "latent_channels",
        lambda config: (math.prod(config["temporal_expansions"]), math.prod(config["spatial_expansions"])),
        in_chunks="decoder",
        fourier_pixels=True,
    ),
    "AutoencoderKLAllegro": Family(
        "latent_channels", _ratio_and_levels, first=0, encode=_allegro_encode, decode=_allegro_decode
    ),
    "AutoencoderKLCosmos": Family("latent_channels", _ratios, encode=_code),
}


@MODELS.register_module()
class DiffusersVideoVAE(DiffusersVAE):
    """Any of diffusers' video VAEs: Wan, HunyuanVideo, CogVideoX, LTX-Video, Mochi, Allegro, Cosmos, ...

    Args:
        from_pretrained: See `DiffusersVAE`; the folder's config names the class. In its place, `architecture` is
            `dict(type="AutoencoderKLWan", ...)` with arguments of that class.
        time_chunks: "whole": all frames together; "chunked": in overlapping or cached chunks, with less memory; "default" as
            the class itself does it. Only for classes that have the choice (HunyuanVideo, LTX, Mochi, Wan). Wan gives the
            same either way, so its default is "whole" where that needs no more memory: while gradients are recorded, for
            then all activations are kept anyway, and for a single frame.
        **options: See `DiffusersVAE`; docs/reference/vae.md says what each does.
    """

    def __init__(self, from_pretrained: str | None = None, *, time_chunks: str = "default", **options: Any) -> None:
        self._encodes_otherwise = False  # than by default
        super().__init__(from_pretrained, **options)
        self._check_choice("time_chunks", time_chunks, ("default", "whole", "chunked"))
        self.time_chunks = time_chunks
        if time_chunks == "default" or self.family.whole:
            return
        if self.family.in_chunks == "nothing":
            name = type(self.autoencoder).__name__
            raise self._error(f"time_chunks={time_chunks!r}: {name} has one way; leave it 'default'.")
        chunked = time_chunks == "chunked"
        self.autoencoder.use_framewise_decoding = chunked
        if self.family.in_chunks == "both":
            self._encodes_otherwise = self.autoencoder.use_framewise_encoding != chunked
            self.autoencoder.use_framewise_encoding = chunked

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {name: getattr(diffusers, name) for name in FAMILIES if hasattr(diffusers, name)}

    def _class_of(self, config: Config, name: str) -> Any:
        if config.get("_class_name") == OF_NOVA:
            raise UserError(
                f"VAE: {name} is a {OF_NOVA}, NOVA's video VAE, whose network is not here. To train from its stored latents, set "
                "vae.type='ScaleOnlyVAE'. To encode or decode, pass another VAE, and latents and a model of it: docs/how-to/nova.md."
            )
        return super()._class_of(config, name)

    def _set_up(self, config: Config) -> None:
        self.family = family = FAMILIES[type(self.autoencoder).__name__]
        self.out_channels = int(config[family.channels])
        time, side = family.strides(config)
        self.strides = (time, side, side)
        self.step = time if family.step is None else family.step(config)  # legal numbers of frames are this far apart
        self.frames_rule = f"it takes {self.step}k + 1 frames" if family.first else f"it takes {self.step}k frames"
        if family.fourier_pixels:  # pixels come in fp32, and their waves go on in the dtype of the weights
            self.autoencoder.encoder.proj_in.register_forward_pre_hook(_cast_to_weights)
        if family.whole:
            from opensora.models.vae import wan_whole  # classes of diffusers, which take a second to import

            wan_whole.enable_whole(self.autoencoder)
            self.encode_whole, self.decode_whole = wan_whole.encode_whole, wan_whole.decode_whole

    def legal_num_frames(self, num_frames: int) -> int:
        """The nearest number of frames that the VAE takes; of two equally near ones the smaller."""
        first, step = self.family.first, self.step
        groups = math.ceil((int(num_frames) - first) / step - 0.5)  # halves go down
        return first + step * max(groups, 1 - first)

    def latent_frames(self, num_frames: int) -> int:
        """How many latent frames a video of a legal number of frames has."""
        return (num_frames - self.family.first) // self.strides[0] + self.family.first

    def video_frames(self, latent_frames: int) -> int:
        """How many frames so many latent frames are decoded to."""
        return (latent_frames - self.family.first) * self.strides[0] + self.family.first

    def _encode(self, x: Tensor) -> Tensor:
        if self._whole(x.shape[2]):
            return self.encode_whole(self.autoencoder, x)
        parts = x.split(1 if self.family.one_at_a_time else len(x))
        return torch.cat([self.family.encode(self.autoencoder, part) for part in parts])

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        if self._whole(num_frames):
            return self.decode_whole(self.autoencoder, z)
        parts = z.split(1 if self.family.one_at_a_time else len(z))
        return torch.cat([self.family.decode(self.autoencoder, part) for part in parts])

    def _whole(self, num_frames: int) -> bool:
        """Whether all frames are to be encoded and decoded together."""
        cheap = num_frames == 1 or torch.is_grad_enabled()
        return self.family.whole and (self.time_chunks == "whole" or (self.time_chunks == "default" and cheap))

    def _input_dtype(self, *, decoding: bool) -> torch.dtype:
        # rounded to bf16, pixels are up to 2^-9 off: a quarter of a period, of which Mochi's waves have 128 a unit
        return torch.float32 if self.family.fourier_pixels and not decoding else super()._input_dtype(decoding=decoding)

    def _latent_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"time_chunks": self.time_chunks} if self._encodes_otherwise else {}
        if self.family.fourier_pixels and next(self.autoencoder.parameters()).dtype != torch.float32:
            settings["pixels"] = "fp32"  # caches of before this was so hold wrong latents
        return settings

    def _config(self) -> Mapping[str, Any]:
        config = dict(self.autoencoder.config)
        if self.family.buffers and not self.autoencoder.latents_mean.is_meta:
            config |= {name: getattr(self.autoencoder, name).tolist() for name in ("latents_mean", "latents_std")}
        return config

    def _write_config(self, **values: Any) -> None:
        """Classes without `scaling_factor` or with tensors get one scale and shift for all as lists, one value a channel."""
        if not self.family.buffers and "scaling_factor" in parameters_of(type(self.autoencoder)):
            super()._write_config(**values)
            return
        config = {**self._config(), **values}
        scale, shift = scale_and_shift(config, self.out_channels, whose=type(self).__name__)
        lists = {"latents_mean": shift.flatten().tolist(), "latents_std": (1 / scale).flatten().tolist()}
        if not self.family.buffers:
            super()._write_config(**lists)
            return
        for name, channels in lists.items():
            getattr(self.autoencoder, name).copy_(torch.tensor(channels))
        super()._write_config(scaling_factor=1.0)
