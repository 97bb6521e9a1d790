"""VAEs whose network is a class of diffusers: building, loading, checking and saving it.

The folder format is diffusers' own (`config.json`, `diffusion_pytorch_model.safetensors`): what is trained here, diffusers
reads, and the other way round. `latents_mean`, `latents_std` and `shift_factor` are kept in `config.json` also for classes
that do not know them; diffusers then says that it ignores them.
"""

import inspect
import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.models.vae.base import STATISTICS, VideoVAE
from opensora.registry import did_you_mean
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

CONFIG = "config.json"
WEIGHTS = ("diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.bin")


class DiffusersVAE(VideoVAE):
    """A `VideoVAE` with `autoencoder`, a model of diffusers.

    Args:
        from_pretrained: Folder in diffusers' format, `package:PACKAGE/folder`, or hub id. Exactly one of this and
            `architecture`.
        micro_batch_size: See `VideoVAE`, like all that is not named here.
        subfolder: The folder's or hub repository's part that holds the VAE.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        scaling_factor: Replaces the config's `scaling_factor`.
        architecture: Arguments of the class in diffusers: an untrained VAE.
        dtype: Number format of the weights, and so of the computation outside autocast. Files may hold any.
    """

    autoencoder: Any  # untyped, as diffusers' mixins are

    def __init__(
        self,
        from_pretrained: str | None,
        architecture: Mapping[str, Any] | None,
        *,
        subfolder: str | None,
        cache_dir: str | None,
        local_files_only: bool,
        dtype: str | torch.dtype,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if (from_pretrained is None) == (architecture is None):
            raise self._complaint("give exactly one of from_pretrained (trained) and architecture (new).")
        dtype = to_torch_dtype(dtype)
        if architecture is not None:
            self.autoencoder = self._untrained(architecture)
        else:
            self.autoencoder = self._load(str(from_pretrained), subfolder, cache_dir, local_files_only, dtype)
        if dtype == torch.float16 and self.autoencoder.config.get("force_upcast"):
            warnings.warn(
                f"{type(self).__name__}: its config says force_upcast, because fp16 overflows in it; use bf16 or fp32.",
                stacklevel=3,
            )

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        """The classes of diffusers that may be named, by name; the first is the default."""
        raise NotImplementedError

    @classmethod
    def _complete(cls, architecture: dict[str, Any]) -> dict[str, Any]:
        """Arguments that follow from others and may be left out."""
        return architecture

    def save_pretrained(self, folder: str | Path, dtype: str | torch.dtype = "fp32") -> None:
        """Write `config.json` and `diffusion_pytorch_model.safetensors`, which diffusers reads too."""
        # diffusers would reset what was a default when the VAE was made, `latents_std` for example
        config = {key: value for key, value in self.autoencoder.config.items() if key != "_use_default_values"}
        parameters = self.autoencoder.state_dict()
        autoencoder = type(self.autoencoder)(**self._arguments(config))
        autoencoder.register_to_config(**{key: config[key] for key in STATISTICS if key in config})
        autoencoder.load_state_dict(parameters)
        autoencoder.to(to_torch_dtype(dtype)).save_pretrained(folder)

    def _network(self) -> nn.Module:
        return self.autoencoder

    def _config(self) -> Mapping[str, Any]:
        return dict(self.autoencoder.config)

    def _write_config(self, **values: Any) -> None:
        self.autoencoder.register_to_config(**values)

    def _arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        known = parameters_of(type(self.autoencoder))
        return {key: value for key, value in config.items() if key in known}

    def _untrained(self, architecture: Mapping[str, Any]) -> Any:
        constructor, arguments = self._choose(architecture)
        known = parameters_of(constructor)
        for key in arguments:
            if key not in known and key not in STATISTICS:
                raise UserError(
                    f"VAE architecture: no argument {key!r}.{did_you_mean(key, known)} {constructor.__name__} takes: "
                    f"{', '.join(known)}."
                )
        autoencoder = constructor(**{key: value for key, value in self._complete(arguments).items() if key in known})
        autoencoder.register_to_config(**{key: arguments[key] for key in STATISTICS if key in arguments})
        return autoencoder

    def _choose(self, architecture: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        classes = self._classes()
        arguments = dict(architecture)
        name = arguments.pop("type", next(iter(classes)) if len(classes) == 1 else None)
        if name not in classes:
            missing = "architecture needs a type" if name is None else f"architecture.type={name!r} is not among them"
            raise self._complaint(f"{missing}.{did_you_mean(str(name), list(classes))} Types: {', '.join(classes)}.")
        return classes[name], arguments

    def _load(
        self,
        name: str,
        subfolder: str | None,
        cache_dir: str | None,
        local_files_only: bool,  # noqa: FBT001  (private, called once)
        dtype: torch.dtype,
    ) -> Any:
        folder = resolve_pretrained(name, what="VAE", subfolder=subfolder, any_of=[(CONFIG,), WEIGHTS])
        inner = Path(folder) / (subfolder or "")
        where: dict[str, Any] = {
            "subfolder": subfolder or "",
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        variant = None
        if inner.is_dir():
            plain = [path for pattern in WEIGHTS for path in inner.glob(pattern) if ".fp16" not in path.name]
            variant = None if plain else "fp16"
        try:
            config = _read_config(self._classes(), folder, inner, where)
            constructor = self._class_of(config, name)
            with _quiet_about(config.keys() - set(parameters_of(constructor))):
                autoencoder, info = constructor.from_pretrained(
                    folder,
                    **where,
                    torch_dtype=dtype,
                    variant=variant,
                    low_cpu_mem_usage=False,  # the other way needs `accelerate`, to save megabytes
                    output_loading_info=True,
                )
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


def strides_of_levels(block_out_channels: Sequence[int]) -> tuple[int, int]:
    """(height, width) of a cell, where each level but the last halves the picture."""
    factor = 2 ** (len(block_out_channels) - 1)
    return factor, factor


def parameters_of(constructor: Any) -> list[str]:
    """The names of a class's arguments."""
    return [name for name in inspect.signature(constructor.__init__).parameters if name != "self"]


@contextmanager
def _quiet_about(unknown: Collection[str]) -> Iterator[None]:
    """Diffusers says that it ignores `STATISTICS` which a class does not know: we do not."""
    logger = logging.getLogger("diffusers.configuration_utils")
    before = logger.level
    if not {key for key in unknown if not key.startswith("_")} - set(STATISTICS):
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _read_config(classes: Mapping[str, Any], folder: str, inner: Path, where: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` as it is, with the keys that the class does not know."""
    if inner.is_dir():
        return json.loads((inner / CONFIG).read_text())
    return dict(next(iter(classes.values())).load_config(folder, **where))
