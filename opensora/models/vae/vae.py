"""VAEs whose network is a class of diffusers: building, loading, checking and saving it; and the image VAEs among them.

The folder format is diffusers' own (`config.json`, `diffusion_pytorch_model.safetensors`): what is trained here, diffusers
reads, and the other way round. `latents_mean`, `latents_std` and `shift_factor` are kept in `config.json` also for classes
that do not know them; diffusers then says that it ignores them.

`VideoAutoencoderKL` is what Open-Sora 1.0 and 1.1 train on (Rombach et al. 2022, arXiv:2112.10752);
`VideoAutoencoderKLTemporalDecoder` is Stable Video Diffusion's (Blattmann et al. 2023, arXiv:2311.15127), with the same latents
and a decoder that looks across frames: steadier videos.
"""

import inspect
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.models.vae.base import STATISTICS, VideoVAE
from opensora.registry import MODELS, did_you_mean
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
CONFIG = "config.json"
WEIGHTS = ("diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.bin")


class DiffusersVAE(VideoVAE):
    """A `VideoVAE` with `autoencoder`, a model of diffusers.

    Args:
        from_pretrained: Folder in diffusers' format, `package:PACKAGE/folder`, or hub id. Exactly one of this and
            `architecture`.
        architecture: Arguments of the class in diffusers: an untrained VAE.
        subfolder: The folder's or hub repository's part that holds the VAE.
        cache_dir, local_files_only: Where the hub's files are kept, and whether not to ask the hub.
        scaling_factor: Replaces the config's `scaling_factor`.
        tile_size: Encode and decode images larger than this (pixels, height and width) in overlapping square tiles.
        tile_overlap: Of neighbouring tiles, as a part of a tile; its middle half blends from one to the other.
        **options: See `VideoVAE`.
    """

    autoencoder: Any  # untyped, as diffusers' mixins are

    def __init__(
        self,
        from_pretrained: str | None = None,
        *,
        architecture: Mapping[str, Any] | None = None,
        subfolder: str | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
        scaling_factor: float | None = None,
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not 0 <= tile_overlap <= 0.5:
            raise self._error(f"tile_overlap={tile_overlap}; use a part of a tile from 0 to 0.5.")
        self.tile_size, self.tile_overlap = tile_size, tile_overlap
        if (from_pretrained is None) == (architecture is None):
            raise self._error("give exactly one of from_pretrained (trained) and architecture (new).")
        if architecture is not None:
            self.autoencoder = self._untrained(architecture)
        else:
            where = {"subfolder": subfolder or "", "cache_dir": cache_dir, "local_files_only": local_files_only}
            self.autoencoder = self._load(str(from_pretrained), where)
        if self._dtype == torch.float16 and self.autoencoder.config.get("force_upcast"):
            warnings.warn(
                f"{type(self).__name__}: its config says force_upcast, because fp16 overflows in it; use bf16 or fp32.",
                stacklevel=2,
            )
        self._set_up(self.autoencoder.config)
        self._ready()
        if scaling_factor is not None:
            self.set_latent_statistics(scaling_factor=scaling_factor)

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        """The classes of diffusers that may be named, by name; the first is the default."""
        raise NotImplementedError

    @classmethod
    def _complete(cls, architecture: dict[str, Any]) -> dict[str, Any]:
        """Arguments that follow from others and may be left out."""
        return architecture

    def _set_up(self, config: Mapping[str, Any]) -> None:
        """Take what the contract asks for, such as `strides`, from the autoencoder's config."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path, dtype: str | torch.dtype = "fp32") -> None:
        """Write `config.json` and `diffusion_pytorch_model.safetensors`, which diffusers reads too."""
        # diffusers would reset what was a default when the VAE was made, `latents_std` for example
        config = {key: value for key, value in self.autoencoder.config.items() if key != "_use_default_values"}
        autoencoder = _build(type(self.autoencoder), config)
        autoencoder.load_state_dict(self.autoencoder.state_dict())
        autoencoder.to(to_torch_dtype(dtype)).save_pretrained(folder)

    def _network(self) -> nn.Module:
        return self.autoencoder

    def _config(self) -> Mapping[str, Any]:
        return dict(self.autoencoder.config)

    def _write_config(self, **values: Any) -> None:
        self.autoencoder.register_to_config(**values)

    def _untrained(self, architecture: Mapping[str, Any]) -> Any:
        classes, arguments = self._classes(), dict(architecture)
        name = arguments.pop("type", next(iter(classes)) if len(classes) == 1 else None)
        if name not in classes:
            missing = "architecture needs a type" if name is None else f"architecture.type={name!r} is not among them"
            raise self._error(f"{missing}.{did_you_mean(str(name), list(classes))} Types: {', '.join(classes)}.")
        known = parameters_of(classes[name])
        for key in arguments:
            if key not in known and key not in STATISTICS:
                raise UserError(
                    f"VAE architecture: no argument {key!r}.{did_you_mean(key, known)} {name} takes: {', '.join(known)}."
                )
        return _build(classes[name], self._complete(arguments))

    def _load(self, name: str, where: dict[str, Any]) -> Any:
        """The autoencoder of a folder or hub id; `where`: diffusers' options that say where it lies."""
        logger.info("loading the VAE %s", name)
        folder = resolve_pretrained(name, what="VAE", subfolder=where["subfolder"], any_of=[(CONFIG,), WEIGHTS])
        inner, variant = Path(folder) / where["subfolder"], None
        if inner.is_dir():
            plain = [path for pattern in WEIGHTS for path in inner.glob(pattern) if ".fp16" not in path.name]
            variant = None if plain else "fp16"
        try:
            # as it is, with the keys that the class does not know
            if inner.is_dir():
                config = json.loads((inner / CONFIG).read_text())
            else:
                config = dict(next(iter(self._classes().values())).load_config(folder, **where))
            # low_cpu_mem_usage would need `accelerate`, to save megabytes
            options = {"torch_dtype": self._dtype, "variant": variant, "low_cpu_mem_usage": False}
            constructor = self._class_of(config, name)
            autoencoder, info = constructor.from_pretrained(folder, **where, **options, output_loading_info=True)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise hub_error(name, "VAE", error) from error
        wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
        if wrong:
            raise UserError(f"VAE: the weights in {name} do not fit its config.json: {wrong}")
        autoencoder.register_to_config(**{key: config[key] for key in STATISTICS if key in config})
        return autoencoder

    def _class_of(self, config: Mapping[str, Any], name: str) -> Any:
        classes = self._classes()
        described = config.get("_class_name", next(iter(classes)) if len(classes) == 1 else None)
        if described not in classes:
            raise UserError(
                f"VAE: {CONFIG} of {name} describes a {described}; {type(self).__name__} loads {', '.join(classes)}."
            )
        return classes[described]


def parameters_of(constructor: Any) -> list[str]:
    """The names of a class's arguments."""
    return [name for name in inspect.signature(constructor.__init__).parameters if name != "self"]


def _build(constructor: Any, config: Mapping[str, Any]) -> Any:
    """An autoencoder with what it knows of a config, and with the `STATISTICS` of it in any case."""
    known = parameters_of(constructor)
    autoencoder = constructor(**{key: value for key, value in config.items() if key in known})
    autoencoder.register_to_config(**{key: config[key] for key in STATISTICS if key in config})
    return autoencoder


@MODELS.register_module()
class VideoAutoencoderKL(DiffusersVAE):
    """Diffusers' `AutoencoderKL`, applied to every frame. Block types of its `architecture` may be left out.

    Arguments: those of `DiffusersVAE`; docs/reference/vae.md says what each does. `micro_batch_size` counts frames.
    """

    encodes_frames = decodes_frames = True

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {"AutoencoderKL": diffusers.AutoencoderKL}

    @classmethod
    def _complete(cls, architecture: dict[str, Any]) -> dict[str, Any]:
        levels = len(architecture.get("block_out_channels", (64,)))
        blocks = {
            "down_block_types": ("DownEncoderBlock2D",) * levels,
            "up_block_types": ("UpDecoderBlock2D",) * levels,
        }
        return {**blocks, **architecture}

    def _set_up(self, config: Mapping[str, Any]) -> None:
        self.out_channels = config["latent_channels"]
        side = 2 ** (len(config["block_out_channels"]) - 1)
        self.strides = (1, side, side)

    def _encode(self, x: Tensor) -> Tensor:
        return self.autoencoder._encode(x)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        return self.autoencoder._decode(z, return_dict=False)[0]


@MODELS.register_module()
class VideoAutoencoderKLTemporalDecoder(VideoAutoencoderKL):
    """Diffusers' `AutoencoderKLTemporalDecoder`: encodes frame by frame, decodes the frames of a video together.

    `micro_batch_size`: encode at most so many frames at a time, and decode one video at a time.

    Args:
        from_pretrained: See `DiffusersVAE`.
        decode_chunk_size: Decode so many frames together, without looking at the frames before and after: less memory, and
            a jump between the chunks. None: all frames of a video.
        **options: See `DiffusersVAE`; docs/reference/vae.md says what each does.
    """

    decodes_frames = False

    def __init__(
        self, from_pretrained: str | None = None, *, decode_chunk_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(from_pretrained, **options)
        if decode_chunk_size is not None and decode_chunk_size < 1:
            raise self._error(f"decode_chunk_size={decode_chunk_size}; use a positive number or None.")
        self.decode_chunk_size = decode_chunk_size

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {"AutoencoderKLTemporalDecoder": diffusers.AutoencoderKLTemporalDecoder}

    def _encode(self, x: Tensor) -> Tensor:
        # not its `encode`, which builds a distribution to take it apart again
        return self.autoencoder.quant_conv(self.autoencoder.encoder(x))

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        decoded = []
        for chunk in z.split(self.decode_chunk_size or num_frames, dim=2):  # [N, C, t, h, w]
            frames = self._layout(rearrange(chunk, "N C t h w -> (N t) C h w"))
            x = self.autoencoder.decode(frames, num_frames=chunk.shape[2], return_dict=False)[0]
            decoded.append(rearrange(x, "(N t) C H W -> N C t H W", N=len(z)))
        return torch.cat(decoded, dim=2)
