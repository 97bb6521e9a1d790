"""The video VAE of Open-Sora 1.2: a picture VAE, and a temporal VAE over its latents.

    x [B, 3, T, H, W] -> picture latents [B, 4, T, H/8, W/8] -> in pieces of 17 frames -> z [B, 4, t, H/8, W/8]

Each piece of `micro_frame_size` frames is encoded and decoded by itself, so that memory does not grow with length:
t = 5 (T div 17) + ceil((T mod 17) / 4). Latents are scaled as z = (raw - shift) / scale, one number a channel.

Deviations from the published code: it draws the picture latents from their posterior, here they are its mean, so that the
moments of a video are a function of it and can be stored; and it returns unscaled latents with `cal_loss`, here `forward`
returns what a loss needs. Like that code, and unlike the config of the picture VAE (0.13025), it scales picture latents by
0.18215: the temporal weights were trained so.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opensora.checkpoint.weight_files import write_file
from opensora.checkpoint.weight_sources import find_weights
from opensora.models.loading import Conversion, load_weights
from opensora.models.vae.base import MemoryFormat, Posterior, VideoVAE
from opensora.models.vae.diffusers_vae import DiffusersVAE
from opensora.models.vae.temporal import statistics_of
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

FrameSize = int | Literal["saved"] | None

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
OURS, THEIRS = "spatial_vae.autoencoder.", "spatial_vae.module."
SPATIAL = "spatial_vae."  # theirs as `read_weights` gives it: it drops ".module"
STATISTICS_FILE = ("scale", "shift")  # tensors of the published file
SCALE, SHIFT = (3.85, 2.32, 2.33, 3.06), (-0.10, 0.34, 0.27, 0.98)
PICTURE_SCALING = 0.18215
FROM_HUB = ("from_pretrained", "subfolder", "cache_dir", "local_files_only", "architecture", "scaling_factor")
MICRO_FRAME_SIZE = 17
PICTURE_VAE = "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers"  # in its folder vae
PICTURE_ARCHITECTURE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": PICTURE_SCALING,
}


@MODELS.register_module()
class VideoAutoencoderPipeline(VideoVAE):
    """A picture VAE followed by a temporal VAE; the module's docstring has the formulas.

    Args:
        vae_2d: Component dict of the picture VAE; None: as `config.json` beside the weights says.
        vae_temporal: Component dict of the temporal VAE; None: as `config.json` says.
        from_pretrained: Weights of both: a folder, a file or a hub id, in Open-Sora's names; None: the parts' own.
        micro_frame_size: Frames of a piece; None: the whole video at once; "saved": as `config.json` beside the weights
            says, and the whole video where there is none.
        freeze_vae_2d: Train the temporal VAE alone.
        scale, shift: Of the latents, z = (raw - shift) / scale: a number, or one a channel. Those of `config.json` win, and
            those of the weights' file before all.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        micro_batch_size: At most so many videos at a time; pictures have `vae_2d`'s own micro_batch_size and tile_size.
        dtype: Number format of the weights.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile the parts' encoders and decoders.
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
        scale: float | Sequence[float] = 1.0,
        shift: float | Sequence[float] = 0.0,
        posterior: Posterior = "sample",
        micro_batch_size: int | None = None,
        dtype: str | torch.dtype = "fp32",
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        # memory format and compilation are the parts' affair
        super().__init__(posterior=posterior, micro_batch_size=micro_batch_size)
        written = written_config(from_pretrained)
        self.parts = self._parts(vae_2d, vae_temporal, from_pretrained, written)
        settings = {"memory_format": memory_format, "compile": compile}
        self.spatial_vae = MODELS.build(self.parts["vae_2d"], posterior="mode", **settings)
        self.temporal_vae = MODELS.build(self.parts["vae_temporal"], **settings)
        if self.spatial_vae.out_channels != self.temporal_vae.in_channels or self.spatial_vae.strides[0] != 1:
            raise self._complaint("vae_2d must work frame by frame, with as many channels as vae_temporal takes.")
        self.micro_frame_size = self._frame_size(micro_frame_size, written)
        self.out_channels = self.temporal_vae.out_channels
        by_time, (_, by_height, by_width) = self.temporal_vae.strides[0], self.spatial_vae.strides
        self.strides = (by_time, by_height, by_width)
        if freeze_vae_2d:
            self.spatial_vae.requires_grad_(False)
        scale, shift = (written.get(name, value) for name, value in zip(STATISTICS_FILE, (scale, shift), strict=True))
        self.values: dict[str, Any] = statistics_of(scale, shift, self.out_channels)
        if from_pretrained is not None:
            load_weights(self, from_pretrained, convert)
        self._ready(to_torch_dtype(dtype))

    def latent_frames(self, num_frames: int) -> int:
        """Of whole pieces and the rest."""
        return sum(self.temporal_vae.latent_frames(frames) for frames in self._pieces(num_frames))

    def video_frames(self, latent_frames: int) -> int:
        """The longest video with so many latent frames."""
        if self.micro_frame_size is None:
            return self.temporal_vae.video_frames(latent_frames)
        whole, rest = divmod(latent_frames, self.temporal_vae.latent_frames(self.micro_frame_size))
        return whole * self.micro_frame_size + (self.temporal_vae.video_frames(rest) if rest else 0)

    @property
    def chunk_latent_frames(self) -> int | None:
        """Of a piece of `micro_frame_size` frames."""
        return None if self.micro_frame_size is None else self.temporal_vae.latent_frames(self.micro_frame_size)

    def legal_num_frames(self, num_frames: int) -> int:
        """Any number of frames, from 1."""
        return max(int(num_frames), 1)

    @property
    def last_layer(self) -> nn.Parameter:
        """The kernel of the decoder's last convolution that is trained, if any is."""
        last = self.spatial_vae.last_layer
        return last if last.requires_grad else self.temporal_vae.last_layer

    def save_pretrained(self, folder: str | Path, dtype: str = "fp32") -> None:
        """Write `config.json` and `model.safetensors` in Open-Sora's names."""
        folder, statistics = Path(folder), self._statistics()
        config = {
            "model_type": type(self).__name__,
            "vae_2d": described(self.spatial_vae, self.parts["vae_2d"]),
            "vae_temporal": {
                key: value for key, value in self.parts["vae_temporal"].items() if key != "from_pretrained"
            },
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
        pictures = self.spatial_vae.encode(x)  # [N, C, T, h, w]
        pieces = pictures.split(self.micro_frame_size or x.shape[2], dim=2)
        return torch.cat([self.temporal_vae.moments(piece) for piece in pieces], dim=2)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        frames = self._pieces(num_frames)
        pieces = z.split([self.temporal_vae.latent_frames(n) for n in frames], dim=2)
        pictures = [self.temporal_vae.decode(piece, n) for piece, n in zip(pieces, frames, strict=True)]
        return self.spatial_vae.decode(torch.cat(pictures, dim=2), num_frames)

    def _pieces(self, num_frames: int) -> list[int]:
        """Numbers of frames of the pieces."""
        size = self.micro_frame_size or num_frames
        return [min(size, num_frames - start) for start in range(0, num_frames, size)]

    def _parts(
        self,
        vae_2d: Mapping[str, Any] | None,
        vae_temporal: Mapping[str, Any] | None,
        from_pretrained: str | None,
        written: Mapping[str, Any],
    ) -> dict[str, dict[str, Any]]:
        given = {"vae_2d": vae_2d, "vae_temporal": vae_temporal}
        for name, part in given.items():
            if part is None and name not in written:
                raise self._complaint(f"{name} is needed: there is no {CONFIG} beside the weights that describes it.")
        parts = {name: dict(part if part is not None else written[name]) for name, part in given.items()}
        if from_pretrained is not None and parts["vae_2d"].get("from_pretrained") == PICTURE_VAE:
            settings = {key: value for key, value in parts["vae_2d"].items() if key not in FROM_HUB}
            parts["vae_2d"] = picture_vae(None) | settings  # its weights are in our file
        return parts

    def _frame_size(self, given: FrameSize, written: Mapping[str, Any]) -> int | None:
        size = written.get("micro_frame_size") if given == "saved" else given
        if size is not None and (not isinstance(size, int) or size < 1):
            raise self._complaint(f"micro_frame_size={size!r}; use a positive number, None or 'saved'.")
        return size

    def _network(self) -> nn.Module:
        return self

    def _config(self) -> Mapping[str, Any]:
        parts = {"spatial": own_config(self.spatial_vae), "temporal": own_config(self.temporal_vae)}
        return {"micro_frame_size": self.micro_frame_size, **self._statistics(), **parts}

    def _statistics(self) -> dict[str, list[float]]:
        """However they were set, as Open-Sora writes them: z = (raw - latents_mean) / latents_std."""
        factor = float(self.values.get("scaling_factor") or 1.0)
        mean, std = self.values.get("latents_mean"), self.values.get("latents_std")
        if mean is None or std is None:
            mean, std = [float(self.values.get("shift_factor") or 0.0)] * self.out_channels, [1.0] * self.out_channels
        mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu").flatten() for values in (mean, std))
        return {"latents_mean": mean.tolist(), "latents_std": (std / factor).tolist()}

    def _write_config(self, **values: Any) -> None:
        self.values.update(values)


@MODELS.register_module()
class OpenSoraVAE_V1_2(VideoAutoencoderPipeline):
    """Open-Sora 1.2's VAE, 4 x 8 x 8 with 4 channels: `VideoAutoencoderPipeline` with its parts, scale and pieces.

    Args:
        micro_batch_size: Pictures that the picture VAE takes at a time, where `vae_2d` does not say it.
        micro_frame_size: Frames of a piece; None: the whole video at once; "saved": as `config.json` beside the weights
            says, and 17 where there is none.
        from_pretrained: The published weights: folder, file or hub id ("hpcai-tech/OpenSora-VAE-v1.2"). None: the picture
            VAE of PixArt-Sigma from the hub, and an untrained temporal VAE.
        local_files_only: Do not ask the hub for the picture VAE.
        freeze_vae_2d: Train the temporal VAE alone.
        cal_loss: Kept for old configs; must be False, since `forward` returns what a loss needs.
        vae_2d: Component dict in place of the picture VAE; None: as `config.json` says, if it is there.
        vae_temporal: Component dict in place of the temporal VAE; None: as `config.json` says, if it is there.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        dtype: Number format of the weights.
        tile_size: Encode and decode pictures larger than this (pixels) in overlapping square tiles; None: whole.
        tile_overlap: Overlap of neighbouring tiles, as a part of a tile.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile the parts' encoders and decoders.
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
        posterior: Posterior = "sample",
        dtype: str | torch.dtype = "fp32",
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        if cal_loss:
            raise UserError("OpenSoraVAE_V1_2: cal_loss=True is not needed: forward() returns what a loss needs.")
        written = written_config(from_pretrained)
        pictures: dict[str, Any] = {"micro_batch_size": micro_batch_size}
        if vae_2d is not None:
            pictures |= vae_2d
        elif from_pretrained is not None:
            pictures = {**written.get("vae_2d", picture_vae(None)), **pictures}
        else:
            hub = {"from_pretrained": PICTURE_VAE, "subfolder": "vae", "local_files_only": local_files_only}
            pictures |= {"type": "VideoAutoencoderKL", **hub, "scaling_factor": PICTURE_SCALING}
        if tile_size is not None:
            pictures |= {"tile_size": tile_size, "tile_overlap": tile_overlap}
        if micro_frame_size == "saved" and "micro_frame_size" not in written:
            micro_frame_size = MICRO_FRAME_SIZE
        super().__init__(
            vae_2d=pictures,
            vae_temporal=vae_temporal or written.get("vae_temporal", {"type": "VAE_Temporal_SD"}),
            from_pretrained=from_pretrained,
            micro_frame_size=micro_frame_size,
            freeze_vae_2d=freeze_vae_2d,
            scale=SCALE,
            shift=SHIFT,
            posterior=posterior,
            dtype=dtype,
            memory_format=memory_format,
            compile=compile,
        )


def picture_vae(micro_batch_size: int | None) -> dict[str, Any]:
    """Component dict of the picture VAE, without weights."""
    return {
        "type": "VideoAutoencoderKL",
        "architecture": PICTURE_ARCHITECTURE,
        "micro_batch_size": micro_batch_size,
    }


def written_config(from_pretrained: str | None) -> dict[str, Any]:
    """What `config.json` beside the weights says; {} where there is none."""
    if from_pretrained is None:
        return {}
    place = Path(from_pretrained).expanduser()
    folder = place if place.is_dir() else find_weights(from_pretrained).parent
    file = folder / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """Open-Sora's published names -> a `VideoAutoencoderPipeline`'s; its scale and shift are applied."""
    assert isinstance(model, VideoAutoencoderPipeline)
    found = {name: state[name] for name in STATISTICS_FILE if name in state}
    if len(found) == len(STATISTICS_FILE):
        scale, shift = (one_or_all(found[name].float().flatten().tolist()) for name in STATISTICS_FILE)
        read = statistics_of(scale, shift, model.out_channels)
        # a file in fp16 has them rounded, where the config has them exactly
        if any(not equal_in(found["scale"].dtype, model.values[name], numbers) for name, numbers in read.items()):
            model.values = read
    tensors = {own_name(name): tensor for name, tensor in state.items() if name not in found}
    reason = "the scale of the latents, read into the config"
    return Conversion(tensors, "Open-Sora 1.2 VAE", dropped=dict.fromkeys(found, reason))


def equal_in(dtype: torch.dtype, a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether numbers are the same, once they are rounded to `dtype`."""
    return torch.equal(*(torch.tensor(values, device="cpu").to(dtype) for values in (a, b)))


def own_name(name: str) -> str:
    """The published name of a tensor -> ours."""
    if not name.startswith(SPATIAL):
        return name
    return OURS + name.removeprefix(SPATIAL).removeprefix("module.").removeprefix("autoencoder.")


def one_or_all(values: list[float]) -> float | list[float]:
    """[x] -> x: one number for all channels."""
    return values[0] if len(values) == 1 else values


def published_name(name: str) -> str:
    """Our name of a tensor -> the published one."""
    return THEIRS + name.removeprefix(OURS) if name.startswith(OURS) else name


def described(vae: VideoVAE, part: Mapping[str, Any]) -> dict[str, Any]:
    """A component dict that builds the same picture VAE without its own weights."""
    if not isinstance(vae, DiffusersVAE):
        return dict(part)
    architecture = own_config(vae)
    if len(vae._classes()) > 1:
        architecture["type"] = type(vae.autoencoder).__name__
    return {"type": part["type"], "architecture": architecture, "micro_batch_size": vae.micro_batch_size}


def own_config(vae: VideoVAE) -> dict[str, Any]:
    """Without diffusers' notes, such as where the VAE came from, which differ from one run to the next."""
    return {key: value for key, value in vae._config().items() if not key.startswith("_")}
