"""Diffusers' video VAEs, under one contract.

They differ in what a class calls its channels, in how many frames it takes, in where its latents' scale is written, and in
what its `encode` returns. `FAMILIES` says it for each class; the rest is common. (In diffusers the scale is applied by the
pipelines, not by the VAE; the formulas here are those of the pipelines. Cosmos' pipelines multiply by their scheduler's
`sigma_data` as well: that belongs to the scheduler, not here.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import diffusers
import torch
from torch import Tensor, nn

from opensora.acceleration.vae_slicing import LOGVAR_RANGE
from opensora.models.vae.base import MemoryFormat, Posterior
from opensora.models.vae.diffusers_vae import DiffusersVAE, parameters_of
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

Config = Mapping[str, Any]
Network = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """What is particular about one class of diffusers.

    Args:
        channels: The config's key for the latent channels.
        strides: config -> frames, height, width of a latent cell.
        step: config -> a legal number of frames is a multiple of this, plus `first`; None: the stride in time.
        first: 1 where the first frame is encoded by itself; 0 where frames are taken in whole groups.
        encode: (autoencoder, x) -> moments [B, 2C, t, h, w].
        decode: (autoencoder, z) -> x.
        whole: `encode` and `decode` of all frames together, equal to the others but for rounding.
        in_pieces: What diffusers' switches let go through time in pieces, with other results: "nothing", the "decoder", or
            "both".
        fourier_pixels: The encoder begins with waves of the pixels, so that pixels must come in fp32.
        one_at_a_time: The class fails for more than one video.
        statistics: "config": `STATISTICS` of the config; "buffers": `latents_mean` and `latents_std` are tensors of the
            weights' file, `scaling_factor` stands in the config.
    """

    channels: str
    strides: Callable[[Config], tuple[int, int, int]]
    step: Callable[[Config], int] | None = None
    first: int = 1
    encode: Network | None = None
    decode: Network | None = None
    whole: tuple[Network, Network] | None = None
    in_pieces: Literal["nothing", "decoder", "both"] = "nothing"
    fourier_pixels: bool = False
    one_at_a_time: bool = False
    statistics: str = "config"


def _ratios(config: Config) -> tuple[int, int, int]:
    space = int(config["spatial_compression_ratio"])
    return int(config["temporal_compression_ratio"]), space, space


def _wan_strides(config: Config) -> tuple[int, int, int]:
    space = 2 ** (len(config["dim_mult"]) - 1) * (config.get("patch_size") or 1)
    time = 2 ** sum(config["temperal_downsample"])
    if time > WAN_CHUNK:
        raise UserError(f"temperal_downsample={config['temperal_downsample']}: Wan's code encodes 4 frames at a time.")
    return time, space, space


def _levels(time: Callable[[Config], int]) -> Callable[[Config], tuple[int, int, int]]:
    def strides(config: Config) -> tuple[int, int, int]:
        space = 2 ** (len(config["block_out_channels"]) - 1)
        return time(config), space, space

    return strides


def _ltx_strides(config: Config) -> tuple[int, int, int]:
    """From the layers: `spatial_compression_ratio`, where the config has one, is for diffusers' own tiles."""
    time, space = int(config["patch_size_t"]), int(config["patch_size"])
    for halved, kind in zip(config["spatio_temporal_scaling"], config["downsample_type"], strict=False):
        time *= 2 if halved and kind != "spatial" else 1
        space *= 2 if halved and kind != "temporal" else 1
    return time, space, space


def _mochi_strides(config: Config) -> tuple[int, int, int]:
    space = math.prod(config["spatial_expansions"])
    return math.prod(config["temporal_expansions"]), space, space


def _kvae_strides(config: Config) -> tuple[int, int, int]:
    space = 2 ** (len(config["ch_mult"]) - 1)
    return config["temporal_compress_times"], space, space


# ------------------------------------------------------------------------ encoding and decoding, where it is special


def _encode(autoencoder: Any, x: Tensor) -> Tensor:
    return autoencoder.encode(x, return_dict=False)[0].parameters


def _decode(autoencoder: Any, z: Tensor) -> Tensor:
    return autoencoder.decode(z, return_dict=False)[0]


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
    patch = autoencoder.config.get("patch_size")
    return x if patch is None else _unpatchify(x, patch)


# here, because they are made of classes of diffusers, which take a second to import


def _wan_encode_whole(autoencoder: Any, x: Tensor) -> Tensor:
    from opensora.models.vae.wan_whole import encode_whole

    return encode_whole(autoencoder, x)


def _wan_decode_whole(autoencoder: Any, z: Tensor) -> Tensor:
    from opensora.models.vae.wan_whole import decode_whole

    return decode_whole(autoencoder, z)


def _unpatchify(x: Tensor, patch: int) -> Tensor:
    """[B, C w h, T, H, W] -> [B, C, T, H h, W w]: columns come before rows, as Wan 2.2 has them."""
    x = x.unflatten(1, (-1, patch, patch))  # [B, C, w, h, T, H, W]
    return x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)


def _certain(mean: Tensor) -> Tensor:
    """Moments of an autoencoder without a posterior: its code, with the smallest variance that is kept."""
    return torch.cat([mean, torch.full_like(mean, LOGVAR_RANGE[0])], dim=1)


def _encode_code(autoencoder: Any, x: Tensor) -> Tensor:
    return _certain(autoencoder.encode(x, return_dict=False)[0].mode())


def _allegro_encode(autoencoder: Any, x: Tensor) -> Tensor:
    """The network itself: diffusers' `encode` has it in tiles of 24 frames only."""
    return _by_frame(autoencoder.quant_conv, autoencoder.encoder(x))


def _allegro_decode(autoencoder: Any, z: Tensor) -> Tensor:
    return autoencoder.decoder(_by_frame(autoencoder.post_quant_conv, z))


def _to_the_weights(layer: nn.Linear, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before a layer, which casts what it is given to the number format of its weights."""
    return (inputs[0].to(layer.weight.dtype),)


def _by_frame(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    frames = layer(x.transpose(1, 2).flatten(0, 1))  # [(B T), C, H, W]
    return frames.unflatten(0, (len(x), -1)).transpose(1, 2)


def _ltx_decode(autoencoder: Any, z: Tensor) -> Tensor:
    """At decode timestep 0, as its pipeline does by default, where the decoder is conditioned on one."""
    conditioned = autoencoder.config["timestep_conditioning"]
    temb = z.new_zeros(len(z)) if conditioned else None
    if not any(autoencoder.config["decoder_inject_noise"]):
        return autoencoder.decode(z, temb, return_dict=False)[0]
    with torch.random.fork_rng([z.device] if z.is_cuda else []):  # its decoder draws from the global generator
        torch.manual_seed(0)
        return autoencoder.decode(z, temb, return_dict=False)[0]


def _vidtok_encode(autoencoder: Any, x: Tensor) -> Tensor:
    if not autoencoder.is_causal or autoencoder.regularizer != "kl":
        raise UserError("AutoencoderVidTok: only is_causal=True with regularizer='kl' is supported.")
    front = x[:, :, :1].expand(-1, -1, autoencoder.temporal_compression_ratio - 1, -1, -1)
    return autoencoder.encode(torch.cat([front, x], dim=2)).latent_dist.parameters


def _vidtok_decode(autoencoder: Any, z: Tensor) -> Tensor:
    return autoencoder.decode(z)


def _vidtok_strides(config: Config) -> tuple[int, int, int]:
    levels = len(config["ch_mult"]) - 1
    space = 2 ** (levels if config["spatial_ds"] is None else len(config["spatial_ds"]))
    time = 2 ** (2 if config["tempo_ds"] is None else len(config["tempo_ds"]))
    return time, space, space


OF_NOVA = "AutoencoderKLOpenSora"
WAN_CHUNK = 4  # frames that Wan's `encode` takes at a time after the first, whatever the stride
LTX = Family("latent_channels", _ltx_strides, decode=_ltx_decode, in_pieces="both", statistics="buffers")
FAMILIES: dict[str, Family] = {
    "AutoencoderKLWan": Family(
        "z_dim",
        _wan_strides,
        step=lambda _: WAN_CHUNK,
        decode=_wan_decode,
        whole=(_wan_encode_whole, _wan_decode_whole),
    ),
    "AutoencoderKLQwenImage": Family("z_dim", _wan_strides, step=lambda _: WAN_CHUNK, decode=_wan_decode),
    "AutoencoderKLHunyuanVideo": Family("latent_channels", _ratios, in_pieces="both"),
    # its attention takes the batch of its mask for heads (diffusers 0.42)
    "AutoencoderKLHunyuanVideo15": Family("latent_channels", _ratios, one_at_a_time=True),
    # two latent frames are decoded at a time, and only an odd number keeps the first frame apart
    "AutoencoderKLCogVideoX": Family(
        "latent_channels",
        _levels(lambda config: int(config["temporal_compression_ratio"])),
        step=lambda config: 2 * int(config["temporal_compression_ratio"]),
    ),
    "AutoencoderKLLTXVideo": LTX,
    "AutoencoderKLLTX2Video": LTX,
    # its encoder's attention looks at all frames
    "AutoencoderKLMochi": Family("latent_channels", _mochi_strides, in_pieces="decoder", fourier_pixels=True),
    "AutoencoderKLAllegro": Family(
        "latent_channels",
        _levels(lambda config: int(config["temporal_compression_ratio"])),
        first=0,
        encode=_allegro_encode,
        decode=_allegro_decode,
    ),
    "AutoencoderKLCosmos": Family("latent_channels", _ratios, encode=_encode_code),
    "AutoencoderKLMagvit": Family(
        "latent_channels", _levels(lambda config: 2 ** (len(config["block_out_channels"]) - 2))
    ),
    # its decoder takes a last piece of one latent frame for a picture
    "AutoencoderKLKVAEVideo": Family(
        "z_channels",
        _kvae_strides,
        step=lambda config: 2 * int(config["temporal_compress_times"]),
        encode=_encode_code,
    ),
    "AutoencoderVidTok": Family("z_channels", _vidtok_strides, encode=_vidtok_encode, decode=_vidtok_decode),
}


@MODELS.register_module()
class DiffusersVideoVAE(DiffusersVAE):
    """Any of diffusers' video VAEs: Wan, HunyuanVideo, CogVideoX, LTX-Video, Mochi, Allegro, Cosmos, ...

    Args:
        from_pretrained: Folder in diffusers' format, `package:PACKAGE/folder`, or hub id; its config names the class.
            Exactly one of this and `architecture`.
        micro_batch_size: Encode and decode at most so many videos at a time; None: all at once.
        subfolder: The folder's or hub repository's part that holds the VAE, often "vae".
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean. Cosmos and KVAE have no variance.
        scaling_factor: Replaces the config's `scaling_factor`.
        architecture: `dict(type="AutoencoderKLWan", ...)` with arguments of that class: an untrained VAE.
        dtype: Number format of the weights, and so of the computation outside autocast. Files may hold any.
        tile_size: Encode and decode pictures larger than this (pixels) in overlapping square tiles; None: whole.
        tile_overlap: Overlap of neighbouring tiles, as a part of a tile.
        time_chunks: "whole": all frames together; "chunked": in overlapping or cached pieces, with less memory; "default" as
            the class itself does it. Only for classes that have the choice (HunyuanVideo, LTX, Mochi, Wan). Wan gives the
            same either way, so its default is "whole" where that needs no more memory: while gradients are recorded, for
            then all activations are kept anyway, and for a single frame.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile encoder and decoder; a last, smaller micro-batch is filled up to the others' size.
    """

    def __init__(
        self,
        from_pretrained: str | None = None,
        micro_batch_size: int | None = None,
        subfolder: str | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (as the other VAEs' signature)
        posterior: Posterior = "sample",
        scaling_factor: float | None = None,
        architecture: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "fp32",
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        time_chunks: str = "default",
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(
            from_pretrained,
            architecture,
            subfolder=subfolder,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            dtype=dtype,
            posterior=posterior,
            micro_batch_size=micro_batch_size,
            tile_size=tile_size,
            tile_overlap=tile_overlap,
            memory_format=memory_format,
            compile=compile,
        )
        self.family = FAMILIES[type(self.autoencoder).__name__]
        config = self.autoencoder.config
        self.out_channels = int(config[self.family.channels])
        self.strides = self.family.strides(config)
        self.time_chunks = time_chunks
        self._choose_chunks()
        if self.family.fourier_pixels:
            self.autoencoder.encoder.proj_in.register_forward_pre_hook(_to_the_weights)
        self._ready(to_torch_dtype(dtype), scaling_factor)

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {name: getattr(diffusers, name) for name in FAMILIES if hasattr(diffusers, name)}

    def _class_of(self, config: Config, name: str) -> Any:
        if config.get("_class_name") == OF_NOVA:
            raise UserError(
                f"VAE: {name} is a {OF_NOVA}, NOVA's video VAE, whose network is not here. To train from its stored latents, set "
                "vae.type='ScaleOnlyVAE'. To encode or decode, pass another VAE, and latents and a model of it: docs/nova.md."
            )
        return super()._class_of(config, name)

    @property
    def step(self) -> int:
        """Legal numbers of frames are this apart."""
        return self.strides[0] if self.family.step is None else self.family.step(self.autoencoder.config)

    @property
    def frames_rule(self) -> str:
        """The legal numbers of frames in words, for messages."""
        return f"it takes {self.step}k + 1 frames" if self.family.first else f"it takes multiples of {self.step} frames"

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
        whole = self._whole(x.shape[2])
        return self._by_family(whole[0] if whole else self.family.encode or _encode, x)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        whole = self._whole(num_frames)
        return self._by_family(whole[1] if whole else self.family.decode or _decode, z)

    def _by_family(self, network: Network, x: Tensor) -> Tensor:
        parts = x.split(1 if self.family.one_at_a_time else len(x))
        return torch.cat([network(self.autoencoder, self._layout(part)) for part in parts])

    def _layout(self, x: Tensor) -> Tensor:
        last = self.memory_format == "channels_last"
        return x.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)

    def _whole(self, num_frames: int) -> tuple[Network, Network] | None:
        """How to encode and decode all frames together, where that is to be done."""
        cheap = num_frames == 1 or torch.is_grad_enabled()
        return self.family.whole if self.time_chunks == "whole" or (self.time_chunks == "default" and cheap) else None

    def _input_dtype(self, *, decoding: bool) -> torch.dtype:
        # rounded to bf16, pixels are up to 2^-9 off: a quarter of a period, of which Mochi's waves have 128 a unit
        return torch.float32 if self.family.fourier_pixels and not decoding else super()._input_dtype(decoding=decoding)

    def _latent_settings(self) -> dict[str, Any]:
        settings = super()._latent_settings()
        if self._encodes_otherwise:
            settings["time_chunks"] = self.time_chunks
        if self.family.fourier_pixels and next(self.autoencoder.parameters()).dtype != torch.float32:
            settings["pixels"] = "fp32"  # caches of before this was so hold wrong latents
        return settings

    def _choose_chunks(self) -> None:
        self._encodes_otherwise = False  # than by default
        self._one_of("time_chunks", self.time_chunks, ("default", "whole", "chunked"))
        if self.family.whole is not None:
            from opensora.models.vae.wan_whole import enable_whole

            enable_whole(self.autoencoder)
        if self.time_chunks == "default" or self.family.whole is not None:
            return
        if self.family.in_pieces == "nothing":
            name = type(self.autoencoder).__name__
            raise self._complaint(f"time_chunks={self.time_chunks!r}: {name} has one way; leave it 'default'.")
        chunked = self.time_chunks == "chunked"
        self.autoencoder.use_framewise_decoding = chunked
        if self.family.in_pieces == "both":
            self._encodes_otherwise = self.autoencoder.use_framewise_encoding != chunked
            self.autoencoder.use_framewise_encoding = chunked

    def _config(self) -> Mapping[str, Any]:
        config = dict(self.autoencoder.config)
        if self.family.statistics == "buffers" and not self.autoencoder.latents_mean.is_meta:
            config |= {name: getattr(self.autoencoder, name).tolist() for name in ("latents_mean", "latents_std")}
        return config

    def _write_config(self, **values: float | Sequence[float] | None) -> None:
        """Classes without `scaling_factor` or with tensors get one scale and shift for all as lists, one number a channel."""
        buffers = self.family.statistics == "buffers"
        if not buffers and "scaling_factor" in parameters_of(type(self.autoencoder)):
            super()._write_config(**values)
            return
        scale, shift = self._scale_and_shift({**self._config(), **values})
        lists = {"latents_mean": shift.flatten().tolist(), "latents_std": (1 / scale).flatten().tolist()}
        if not buffers:
            super()._write_config(**lists)
            return
        for name, numbers in lists.items():
            getattr(self.autoencoder, name).copy_(torch.tensor(numbers))
        super()._write_config(scaling_factor=1.0)
