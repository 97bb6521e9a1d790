"""The video VAE of Open-Sora 1.2: an image VAE, and a temporal VAE over its latents.

    x [B, 3, T, H, W] -> image latents [B, 4, T, H/8, W/8] -> in chunks of 17 frames -> z [B, 4, t, H/8, W/8]

Each chunk of `micro_frame_size` frames is encoded and decoded by itself, so that memory does not grow with length:
t = 5 (T div 17) + ceil((T mod 17) / 4). Latents are scaled as z = (raw - shift) / scale, one value a channel.

The temporal VAE is after MAGVIT-v2 (Yu et al. 2023, arXiv:2310.05737): residual blocks of group normalisation, SiLU and causal
convolution; time is halved by strided convolutions, and doubled by convolutions to twice the channels that become frames.
Space keeps its size. Frames that are missing to a multiple of the stride are zeros in front (causal padding), which decoding
drops again. Names of layers are those of the published weights.

Deviations from the published code: it draws the image latents from their posterior, here they are its mean, so that the
moments of a video are a function of it and can be stored; and it returns unscaled latents with `cal_loss`, here `forward`
returns what a loss needs. Like that code, and unlike the config of the image VAE (0.13025), it scales image latents by
0.18215: the temporal weights were trained so.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.checkpoint.load import load_strictly, read_weights
from opensora.checkpoint.weight_files import find_weights, write_file
from opensora.models.loading import Conversion, load_weights
from opensora.models.vae.base import VideoVAE
from opensora.models.vae.splitting import chunk_lengths
from opensora.models.vae.vae import DiffusersVAE
from opensora.registry import MODELS
from opensora.utils.errors import UserError

FrameSize = int | Literal["saved"] | None
PerChannel = float | Sequence[float]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
OURS, THEIRS = "spatial_vae.autoencoder.", "spatial_vae.module."
STATISTICS_FILE = ("scale", "shift")  # tensors of the published file
SCALE, SHIFT = (3.85, 2.32, 2.33, 3.06), (-0.10, 0.34, 0.27, 0.98)
FROM_HUB = ("from_pretrained", "subfolder", "cache_dir", "local_files_only", "architecture", "scaling_factor")
MICRO_FRAME_SIZE = 17
IMAGE_SCALING = 0.18215
IMAGE_VAE = "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers"  # in its folder vae
IMAGE_ARCHITECTURE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": IMAGE_SCALING,
}


@MODELS.register_module()
class VideoAutoencoderPipeline(VideoVAE):
    """An image VAE followed by a temporal VAE; the module's docstring has the formulas.

    Args:
        vae_2d: Component dict of the image VAE; None: as `config.json` next to the weights says.
        vae_temporal: Component dict of the temporal VAE; None: as `config.json` says.
        from_pretrained: Weights of both: a folder, a file or a hub id, in Open-Sora's names; None: the parts' own.
        micro_frame_size: Frames of a chunk; None: the whole video at once; "saved": as `config.json` next to the weights
            says, and the whole video where there is none.
        freeze_vae_2d: Train the temporal VAE alone.
        scale, shift: Of the latents, z = (raw - shift) / scale: one value, or one a channel. Those of `config.json` win, and
            those of the weights' file before all.
        **options: See `VideoVAE`. `micro_batch_size` counts videos: images have that of `vae_2d`, and its tile_size.
    """

    spatial_vae: VideoVAE
    temporal_vae: VideoVAE

    def __init__(
        self,
        vae_2d: Mapping[str, Any] | None = None,
        vae_temporal: Mapping[str, Any] | None = None,
        from_pretrained: str | None = None,
        micro_frame_size: FrameSize = "saved",
        freeze_vae_2d: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        scale: PerChannel = 1.0,
        shift: PerChannel = 0.0,
        **options: Any,
    ) -> None:
        of_parts = {key: options.pop(key) for key in ("memory_format", "compile") if key in options}
        super().__init__(**options)
        saved = _saved_config(from_pretrained)
        self.components: dict[str, dict[str, Any]] = {}
        for name, given in (("vae_2d", vae_2d), ("vae_temporal", vae_temporal)):
            if given is None and name not in saved:
                raise self._error(f"{name} is needed: there is no {CONFIG} next to the weights that describes it.")
            self.components[name] = dict(given if given is not None else saved[name])
        images = self.components["vae_2d"]
        if from_pretrained is not None and images.get("from_pretrained") == IMAGE_VAE:  # its weights are in our file
            self.components["vae_2d"] = image_vae() | {k: v for k, v in images.items() if k not in FROM_HUB}
        self.spatial_vae = MODELS.build(self.components["vae_2d"], posterior="mode", **of_parts)
        self.temporal_vae = MODELS.build(self.components["vae_temporal"], **of_parts)
        if self.spatial_vae.out_channels != self.temporal_vae.in_channels or self.spatial_vae.strides[0] != 1:
            raise self._error("vae_2d must work frame by frame, with as many channels as vae_temporal takes.")
        size = saved.get("micro_frame_size") if micro_frame_size == "saved" else micro_frame_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise self._error(f"micro_frame_size={size!r}; use a positive number, None or 'saved'.")
        self.micro_frame_size: int | None = size
        self.out_channels = self.temporal_vae.out_channels
        self.strides = (self.temporal_vae.strides[0], *self.spatial_vae.strides[1:])
        if freeze_vae_2d:
            self.spatial_vae.requires_grad_(False)
        self.config = _statistics_of(saved.get("scale", scale), saved.get("shift", shift), self.out_channels)
        if from_pretrained is not None:
            load_weights(self, from_pretrained, convert)
        self._ready()

    def latent_frames(self, num_frames: int) -> int:
        """Of whole chunks and the rest."""
        return sum(map(self.temporal_vae.latent_frames, chunk_lengths(num_frames, self.micro_frame_size)))

    def video_frames(self, latent_frames: int) -> int:
        """The longest video with so many latent frames."""
        chunk = self.chunk_latent_frames
        chunks, rest = divmod(latent_frames, chunk) if chunk else (0, latent_frames)
        return chunks * (self.micro_frame_size or 0) + (self.temporal_vae.video_frames(rest) if rest else 0)

    @property
    def chunk_latent_frames(self) -> int | None:
        """Of a chunk of `micro_frame_size` frames."""
        return None if self.micro_frame_size is None else self.temporal_vae.latent_frames(self.micro_frame_size)

    @property
    def last_layer(self) -> nn.Parameter:
        """The kernel of the decoder's last convolution that is trained, if any is."""
        last = self.spatial_vae.last_layer
        return last if last.requires_grad else self.temporal_vae.last_layer

    def save_pretrained(self, folder: str | Path, dtype: str = "fp32") -> None:
        """Write `config.json` and `model.safetensors` in Open-Sora's names."""
        folder, statistics, spatial = Path(folder), self._statistics(), self.components["vae_2d"]
        if isinstance(self.spatial_vae, DiffusersVAE):  # that builds the same image VAE without its own weights
            architecture = _own_config(self.spatial_vae)
            if len(self.spatial_vae._classes()) > 1:
                architecture["type"] = type(self.spatial_vae.autoencoder).__name__
            size = self.spatial_vae.micro_batch_size
            spatial = {"type": spatial["type"], "architecture": architecture, "micro_batch_size": size}
        config = {
            "model_type": type(self).__name__,
            "vae_2d": spatial,
            "vae_temporal": {k: v for k, v in self.components["vae_temporal"].items() if k != "from_pretrained"},
            "micro_frame_size": self.micro_frame_size,
            "scale": statistics["latents_std"],
            "shift": statistics["latents_mean"],
        }
        tensors = {name: torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in STATISTICS_FILE}
        state = {published_name(name): tensor for name, tensor in self.state_dict().items()}
        (folder / WEIGHTS).unlink(missing_ok=True)
        write_file(state | tensors, folder / WEIGHTS, dtype=str(dtype), header={"format": type(self).__name__})
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    def _encode(self, x: Tensor) -> Tensor:
        images = self.spatial_vae.encode(x)  # [N, C, T, h, w]
        chunks = images.split(self.micro_frame_size or x.shape[2], dim=2)
        return torch.cat([self.temporal_vae.moments(chunk) for chunk in chunks], dim=2)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        frames = chunk_lengths(num_frames, self.micro_frame_size)
        chunks = z.split([self.temporal_vae.latent_frames(n) for n in frames], dim=2)
        images = [self.temporal_vae.decode(chunk, n) for chunk, n in zip(chunks, frames, strict=True)]
        return self.spatial_vae.decode(torch.cat(images, dim=2), num_frames)

    def _config(self) -> Mapping[str, Any]:
        parts = {"spatial": _own_config(self.spatial_vae), "temporal": _own_config(self.temporal_vae)}
        return {"micro_frame_size": self.micro_frame_size, **self._statistics(), **parts}

    def _statistics(self) -> dict[str, list[float]]:
        """However they were set, as Open-Sora writes them: z = (raw - latents_mean) / latents_std."""
        factor = float(self.config.get("scaling_factor") or 1.0)
        mean, std = self.config.get("latents_mean"), self.config.get("latents_std")
        if mean is None or std is None:
            mean, std = [float(self.config.get("shift_factor") or 0.0)] * self.out_channels, [1.0] * self.out_channels
        mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu").flatten() for values in (mean, std))
        return {"latents_mean": mean.tolist(), "latents_std": (std / factor).tolist()}


@MODELS.register_module()
class OpenSoraVAE_V1_2(VideoAutoencoderPipeline):
    """Open-Sora 1.2's VAE, 4 x 8 x 8 with 4 channels: `VideoAutoencoderPipeline` with its parts, scale and chunks.

    Args:
        micro_batch_size: Images that the image VAE takes at a time, where `vae_2d` does not say it.
        micro_frame_size: As in `VideoAutoencoderPipeline`, and 17 where `config.json` says nothing.
        from_pretrained: The published weights: folder, file or hub id ("hpcai-tech/OpenSora-VAE-v1.2"). None: the image
            VAE of PixArt-Sigma from the hub, and an untrained temporal VAE.
        local_files_only: Do not ask the hub for the image VAE.
        cal_loss: Kept for old configs; must be False, since `forward` returns what a loss needs.
        tile_size, tile_overlap: Of the image VAE, see `DiffusersVAE`.
        freeze_vae_2d, vae_2d, vae_temporal, **options: See `VideoAutoencoderPipeline`.
    """

    def __init__(
        self,
        micro_batch_size: int | None = 4,
        micro_frame_size: FrameSize = "saved",
        from_pretrained: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        freeze_vae_2d: bool = False,  # noqa: FBT001, FBT002
        cal_loss: bool = False,  # noqa: FBT001, FBT002
        vae_2d: Mapping[str, Any] | None = None,
        vae_temporal: Mapping[str, Any] | None = None,
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        **options: Any,
    ) -> None:
        if cal_loss:
            raise UserError("OpenSoraVAE_V1_2: cal_loss=True is not needed: forward() returns what a loss needs.")
        saved = _saved_config(from_pretrained)
        images: dict[str, Any] = {"micro_batch_size": micro_batch_size}
        if vae_2d is not None:
            images |= vae_2d
        elif from_pretrained is not None:
            images = saved.get("vae_2d", image_vae()) | images
        else:
            hub = {"from_pretrained": IMAGE_VAE, "subfolder": "vae", "local_files_only": local_files_only}
            images |= {"type": "VideoAutoencoderKL", **hub, "scaling_factor": IMAGE_SCALING}
        if tile_size is not None:
            images |= {"tile_size": tile_size, "tile_overlap": tile_overlap}
        if micro_frame_size == "saved" and "micro_frame_size" not in saved:
            micro_frame_size = MICRO_FRAME_SIZE
        temporal = vae_temporal or saved.get("vae_temporal", {"type": "VAE_Temporal_SD"})
        statistics = {"scale": SCALE, "shift": SHIFT, **options}
        super().__init__(images, temporal, from_pretrained, micro_frame_size, freeze_vae_2d, **statistics)


def image_vae() -> dict[str, Any]:
    """Component dict of the image VAE, without weights."""
    return {"type": "VideoAutoencoderKL", "architecture": IMAGE_ARCHITECTURE}


def _saved_config(from_pretrained: str | None) -> dict[str, Any]:
    """What `config.json` next to the weights says; {} where there is none."""
    if from_pretrained is None:
        return {}
    path = Path(from_pretrained).expanduser()
    file = (path if path.is_dir() else find_weights(from_pretrained).parent) / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """Open-Sora's published names -> a `VideoAutoencoderPipeline`'s; its scale and shift are applied."""
    assert isinstance(model, VideoAutoencoderPipeline)
    found = {name: state[name] for name in STATISTICS_FILE if name in state}
    if len(found) == len(STATISTICS_FILE):
        per_channel = [found[name].float().flatten().tolist() for name in STATISTICS_FILE]
        scale, shift = (values[0] if len(values) == 1 else values for values in per_channel)
        read = _statistics_of(scale, shift, model.out_channels)
        # a file in fp16 has them rounded, where the config has them exactly
        stored = found["scale"].dtype
        rounded = lambda values: torch.tensor(values, device="cpu").to(stored)  # noqa: E731
        if any(not torch.equal(rounded(model.config[name]), rounded(values)) for name, values in read.items()):
            model.config = read
    tensors = {}
    for name, tensor in state.items():
        if name in found:
            continue
        # `read_weights` has dropped ".module" of the published names
        inner = name.removeprefix("spatial_vae.").removeprefix("module.").removeprefix("autoencoder.")
        tensors[OURS + inner if name.startswith("spatial_vae.") else name] = tensor
    reason = "the scale of the latents, read into the config"
    return Conversion(tensors, "Open-Sora 1.2 VAE", dropped=dict.fromkeys(found, reason))


def published_name(name: str) -> str:
    """Our name of a tensor -> the published one."""
    return THEIRS + name.removeprefix(OURS) if name.startswith(OURS) else name


def _statistics_of(scale: PerChannel, shift: PerChannel, channels: int) -> dict[str, Any]:
    """Open-Sora's z = (raw - shift) / scale as entries of `STATISTICS`."""
    mean, std = (
        [float(value)] * channels if isinstance(value, int | float) else [float(v) for v in value]
        for value in (shift, scale)
    )
    return {"latents_mean": mean, "latents_std": std}


def _own_config(vae: VideoVAE) -> dict[str, Any]:
    """Without diffusers' notes, such as where the VAE came from, which differ from one run to the next."""
    return {key: value for key, value in vae._config().items() if not key.startswith("_")}


@MODELS.register_module()
class VAE_Temporal(VideoVAE):
    """Compresses time by 2 for each True of `temporal_downsample`; works on an image VAE's latents [B, C, T, h, w].

    Args:
        in_out_channels, embed_dim: Channels of what it compresses, and of its latents.
        latent_embed_dim: Channels between the encoder or decoder and the 1x1x1 convolutions next to the latents.
        filters, channel_multipliers: Width of the first level, and of each level in `filters`.
        num_res_blocks, num_groups: Residual blocks of a level, and groups of their normalisation.
        temporal_downsample: For each level but the last, whether time is halved after it.
        from_pretrained: Weights in these names; None: untrained.
        scale, shift: Of its latents, z = (raw - shift) / scale: one value, or one a channel.
        **options: See `VideoVAE`.
    """

    def __init__(
        self,
        in_out_channels: int = 4,
        latent_embed_dim: int = 4,
        embed_dim: int = 4,
        filters: int = 128,
        num_res_blocks: int = 4,
        channel_multipliers: Sequence[int] = (1, 2, 2, 4),
        temporal_downsample: Sequence[bool] = (True, True, False),
        num_groups: int = 32,
        from_pretrained: str | None = None,
        scale: PerChannel = 1.0,
        shift: PerChannel = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if len(temporal_downsample) != len(channel_multipliers) - 1:
            raise self._error(
                f"temporal_downsample={tuple(temporal_downsample)} needs one entry less than "
                f"channel_multipliers={tuple(channel_multipliers)}."
            )
        self.in_channels, self.out_channels = in_out_channels, embed_dim
        self.strides = (2 ** sum(temporal_downsample), 1, 1)
        widths = [filters * multiplier for multiplier in channel_multipliers]
        shape = (widths, num_res_blocks, tuple(temporal_downsample), num_groups)
        self.encoder = Encoder(in_out_channels, 2 * latent_embed_dim, *shape)
        self.quant_conv = CausalConv3d(2 * latent_embed_dim, 2 * embed_dim, 1)
        self.post_quant_conv = CausalConv3d(embed_dim, latent_embed_dim, 1)
        self.decoder = Decoder(in_out_channels, latent_embed_dim, *shape)
        self.config = {
            "type": "VAE_Temporal",
            "widths": widths,
            "num_res_blocks": num_res_blocks,
            "temporal_downsample": list(temporal_downsample),
            "num_groups": num_groups,
            **_statistics_of(scale, shift, embed_dim),
        }
        if from_pretrained is not None:
            load_strictly(self, read_weights(from_pretrained), from_pretrained)
        self._ready()

    def _encode(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, self.causal_padding(x.shape[2]), 0))
        return self.quant_conv(self.encoder(self._layout(x)))

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        return self.decoder(self.post_quant_conv(z))[:, :, self.causal_padding(num_frames) :]


MODELS.register_variant("VAE_Temporal_SD", VAE_Temporal, temporal_downsample=(False, True, True))


class CausalConv3d(nn.Module):
    """A convolution over frames up to the present one, [B, C, T, H, W] -> [B, C', T / stride, H, W]."""

    def __init__(self, channels: int, out_channels: int, kernel: int, *, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        space = kernel // 2
        self.padding = (space, space, space, space, kernel - stride, 0)  # width, height, time; time in front only
        self.conv = nn.Conv3d(channels, out_channels, kernel, stride=(stride, 1, 1), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.conv(F.pad(x, self.padding))


class ResBlock(nn.Module):
    """x + conv(act(norm(conv(act(norm(x)))))); a 1x1x1 convolution fits x where the channels change."""

    def __init__(self, channels: int, out_channels: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups, channels)
        self.conv1 = CausalConv3d(channels, out_channels, 3, bias=False)
        self.norm2 = nn.GroupNorm(num_groups, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels, 3, bias=False)
        if channels != out_channels:
            self.conv3 = CausalConv3d(channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T, H, W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.conv3(x) if hasattr(self, "conv3") else x) + h


def _res_blocks(channels: int, width: int, count: int, num_groups: int) -> nn.Sequential:
    return nn.Sequential(*(ResBlock(a, b, num_groups) for a, b in pairwise([channels] + [width] * count)))


class Encoder(nn.Module):
    """[B, C, T, H, W] -> [B, embed_channels, T / stride, H, W]."""

    def __init__(
        self,
        channels: int,
        embed_channels: int,
        widths: list[int],
        count: int,
        downsample: tuple[bool, ...],
        groups: int,
    ) -> None:
        super().__init__()
        last = widths[-1]
        self.conv_in = CausalConv3d(channels, widths[0], 3, bias=False)
        self.block_res_blocks = nn.ModuleList(
            _res_blocks(before, width, count, groups) for before, width in pairwise([widths[0], *widths])
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, width, 3, stride=2) if halve else nn.Identity()
            for width, halve in zip(widths[:-1], downsample, strict=True)
        )
        self.res_blocks = _res_blocks(last, last, count, groups)
        self.norm1 = nn.GroupNorm(groups, last)
        self.conv2 = CausalConv3d(last, embed_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        x = self.conv_in(x)
        for i, blocks in enumerate(self.block_res_blocks):
            x = blocks(x)
            if i < len(self.conv_blocks):
                x = self.conv_blocks[i](x)
        return self.conv2(F.silu(self.norm1(self.res_blocks(x))))


class Decoder(nn.Module):
    """[B, embed_channels, T, H, W] -> [B, C, T stride, H, W]."""

    def __init__(
        self,
        channels: int,
        embed_channels: int,
        widths: list[int],
        count: int,
        downsample: tuple[bool, ...],
        groups: int,
    ) -> None:
        super().__init__()
        last = widths[-1]
        self.conv1 = CausalConv3d(embed_channels, last, 3)
        self.res_blocks = _res_blocks(last, last, count, groups)
        self.block_res_blocks = nn.ModuleList(
            _res_blocks(before, width, count, groups) for width, before in pairwise([*widths, last])
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, 2 * width, 3) if double else nn.Identity()
            for width, double in zip(widths[1:], downsample, strict=True)
        )
        self.norm1 = nn.GroupNorm(groups, widths[0])
        self.conv_out = CausalConv3d(widths[0], channels, 3)

    def forward(self, z: Tensor) -> Tensor:
        """See the class."""
        x = self.res_blocks(self.conv1(z))
        for i in reversed(range(len(self.block_res_blocks))):
            x = self.block_res_blocks[i](x)
            if i > 0 and isinstance(self.conv_blocks[i - 1], CausalConv3d):
                x = rearrange(self.conv_blocks[i - 1](x), "B (C two) T H W -> B C (T two) H W", two=2)
        return self.conv_out(F.silu(self.norm1(x)))
