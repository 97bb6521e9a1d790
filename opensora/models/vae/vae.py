"""A picture VAE applied frame by frame (architecture D5): what Open-Sora 1.0 and 1.1 train on.

The network is diffusers' `AutoencoderKL` (Rombach et al. 2022, arXiv:2112.10752). How latents are scaled is read from the
VAE's own config, so that no other file knows a number of it:

    z_scaled = (z - shift) * scale,  shift = shift_factor or latents_mean,  scale = scaling_factor [/ latents_std]

which is diffusers' convention. Where `latents_mean` and `latents_std` (one number per channel) are present they are used
together with `scaling_factor`, and `shift_factor` is ignored.

A VAE is built trainable. Who only uses it says so: `vae.requires_grad_(False).eval()`.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from diffusers import AutoencoderKL
from einops import rearrange
from torch import Tensor, nn

from opensora.registry import MODELS, did_you_mean
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.pretrained import hub_error, resolve_pretrained
from opensora.utils.seed import randn_like

Posterior = Literal["sample", "mode"]
Generators = Sequence[torch.Generator] | torch.Generator | None

WEIGHTS = ("diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.bin")
LOGVAR_RANGE = (-30.0, 20.0)  # diffusers' own clamp


@MODELS.register_module()
class VideoAutoencoderKL(nn.Module):
    """Diffusers' `AutoencoderKL`, applied to every frame.

    Args:
        from_pretrained: Folder in diffusers' format, `package:PACKAGE/folder`, or hub id. Exactly one of this and
            `architecture`.
        micro_batch_size: Encode and decode at most so many frames at a time; None: all at once.
        subfolder: The folder's or hub repository's part that holds the VAE.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        scaling_factor: Replaces the config's `scaling_factor`.
        architecture: Arguments of `AutoencoderKL`: an untrained VAE. Block types may be left out.
        dtype: Number format of the weights, and so of the computation outside autocast. Files may hold any.
    """

    def __init__(
        self,
        from_pretrained: str | None = None,
        micro_batch_size: int | None = None,
        subfolder: str | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        posterior: Posterior = "sample",
        scaling_factor: float | None = None,
        architecture: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "fp32",
    ) -> None:
        super().__init__()
        if (from_pretrained is None) == (architecture is None):
            raise UserError("VideoAutoencoderKL: give exactly one of from_pretrained (trained) and architecture (new).")
        if posterior not in get_args(Posterior):
            raise UserError(
                f"VideoAutoencoderKL: posterior={posterior!r} is not one of {', '.join(get_args(Posterior))}."
            )
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UserError(f"VideoAutoencoderKL: micro_batch_size={micro_batch_size}; use a positive number or None.")
        if architecture is not None:
            autoencoder = _untrained(architecture)
        else:
            autoencoder = _load(str(from_pretrained), subfolder, cache_dir, local_files_only, to_torch_dtype(dtype))
        self.autoencoder: Any = autoencoder  # untyped, as diffusers' mixins are
        self.to(to_torch_dtype(dtype))
        self.micro_batch_size = micro_batch_size
        self.posterior = posterior
        self.out_channels: int = autoencoder.config["latent_channels"]
        self.spatial_factor: int = 2 ** (len(autoencoder.config["block_out_channels"]) - 1)
        self.scaling_factor: Tensor  # [C] fp32, on the CPU; no buffers, for .to(bf16) must not round them
        self.shift: Tensor
        self.set_latent_statistics(**({} if scaling_factor is None else {"scaling_factor": scaling_factor}))

    def forward(self, x: Tensor, generators: Generators = None) -> tuple[Tensor, Tensor]:
        """Reconstruct, for training the VAE: x [B, 3, T, H, W] -> (x_hat [B, 3, T, H, W], moments [B, 2C, T, h, w])."""
        moments = self.moments(x)
        return self.decode(self.sample(moments, generators)), moments

    def encode(self, x: Tensor, generators: Generators = None) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> scaled latents z [B, C, T, h, w] fp32.

        `generators`: one per sample, for the posterior; None draws from torch's own (not reproducible).
        """
        return self.sample(self.moments(x), generators)

    def moments(self, x: Tensor) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> raw mean and log variance [B, 2C, T, h, w] fp32."""
        if x.dim() != 5:
            raise ValueError(f"the VAE takes [B, 3, T, H, W], got {tuple(x.shape)}")
        self.latent_size((x.shape[2], x.shape[3], x.shape[4]))
        return self._per_frame(self.autoencoder._encode, x)

    def sample(self, moments: Tensor, generators: Generators = None) -> Tensor:
        """moments [B, 2C, T, h, w] -> scaled latents z [B, C, T, h, w] fp32, drawn from the posterior or its mode."""
        z, logvar = moments.float().chunk(2, dim=1)
        if self.posterior == "sample":
            z = z + (0.5 * logvar.clamp(*LOGVAR_RANGE)).exp() * randn_like(z, generators)
        return (z - _per_channel(self.shift, z)) * _per_channel(self.scaling_factor, z)

    def decode(self, z: Tensor, num_frames: int | None = None) -> Tensor:
        """Scaled latents z [B, C, T, h, w] -> x [B, 3, T, H, W] fp32, in [-1, 1] but for the network's error.

        `num_frames` is T; temporal VAEs need it, this one checks it.
        """
        if num_frames is not None and num_frames != z.shape[2]:
            raise ValueError(f"num_frames={num_frames}, but the latents hold {z.shape[2]} frames")
        z = z.float() / _per_channel(self.scaling_factor, z) + _per_channel(self.shift, z)
        return self._per_frame(lambda frames: self.autoencoder._decode(frames, return_dict=False)[0], z)

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """(T, H, W) of a video -> (t, h, w) of its latents."""
        frames, height, width = (int(n) for n in size)
        factor = self.spatial_factor
        if height % factor or width % factor or min(frames, height, width) < 1:
            near = tuple(max(round(n / factor), 1) * factor for n in (height, width))
            raise UserError(
                f"the VAE cannot encode {height}x{width} (height x width) with {frames} frames: sizes are multiples of "
                f"{factor}; the nearest is {near[0]}x{near[1]}."
            )
        return frames, height // factor, width // factor

    def legal_num_frames(self, num_frames: int) -> int:
        """The nearest number of frames that the VAE takes: any, from 1."""
        return max(int(num_frames), 1)

    def fingerprint(self) -> str:
        """A hash of config and weights: latents cached under one fingerprint fit no other."""
        config = {key: value for key, value in dict(self.autoencoder.config).items() if not key.startswith("_")}
        digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=list).encode(), digest_size=16)
        for name, weight in sorted(self.autoencoder.state_dict().items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    def set_latent_statistics(self, **statistics: float | Sequence[float] | None) -> None:
        """Change `scaling_factor`, `shift_factor`, `latents_mean` or `latents_std` of the config and apply it."""
        self.autoencoder.register_to_config(**statistics)
        config = self.autoencoder.config
        scale = torch.full((self.out_channels,), float(config["scaling_factor"]))
        shift = torch.full((self.out_channels,), float(config["shift_factor"] or 0.0))
        if config["latents_mean"] is not None and config["latents_std"] is not None:
            scale = scale / torch.tensor(config["latents_std"]).flatten()
            shift = torch.tensor(config["latents_mean"]).flatten()
        if scale.shape != shift.shape or len(scale) != self.out_channels or not (scale > 0).all():
            raise UserError(
                f"VAE config: scale {scale.tolist()}, shift {shift.tolist()} for {self.out_channels} channels."
            )
        self.scaling_factor, self.shift = scale, shift

    def save_pretrained(self, folder: str | Path, dtype: str | torch.dtype = "fp32") -> None:
        """Write `config.json` and `diffusion_pytorch_model.safetensors`, which diffusers reads too."""
        # diffusers would reset what was a default when the VAE was made, `latents_std` for example
        config = {key: value for key, value in self.autoencoder.config.items() if key != "_use_default_values"}
        copy: Any = AutoencoderKL.from_config(config)
        copy.load_state_dict(self.autoencoder.state_dict())
        nn.Module.to(copy, to_torch_dtype(dtype))  # diffusers' own `to` warns about nothing here
        copy.save_pretrained(folder, safe_serialization=True)

    def _per_frame(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        frames = rearrange(x, "B C T H W -> (B T) C H W").to(self.autoencoder.dtype)
        parts = [network(part) for part in frames.split(self.micro_batch_size or len(frames))]
        return rearrange(torch.cat(parts), "(B T) C H W -> B C T H W", B=len(x)).float()


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).view(1, -1, 1, 1, 1)  # [C] -> [1, C, 1, 1, 1]


def _untrained(architecture: Mapping[str, Any]) -> Any:
    known = [name for name in inspect.signature(AutoencoderKL.__init__).parameters if name != "self"]
    for key in architecture:
        if key not in known:
            raise UserError(
                f"VAE architecture: no argument {key!r}.{did_you_mean(key, known)} AutoencoderKL takes: {', '.join(known)}."
            )
    levels = len(architecture.get("block_out_channels", (64,)))
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
    }
    return AutoencoderKL(**{**blocks, **architecture})


def _load(
    name: str,
    subfolder: str | None,
    cache_dir: str | None,
    local_files_only: bool,  # noqa: FBT001  (private, called once)
    dtype: torch.dtype,
) -> Any:
    folder = resolve_pretrained(name, what="VAE", subfolder=subfolder, any_of=[("config.json",), WEIGHTS])
    variant = None
    inner = Path(folder) / (subfolder or "")
    if inner.is_dir():
        _check_class(inner / "config.json")
        plain = [path for pattern in WEIGHTS for path in inner.glob(pattern) if ".fp16" not in path.name]
        variant = None if plain else "fp16"
    try:
        autoencoder, info = AutoencoderKL.from_pretrained(
            folder,
            subfolder=subfolder or "",
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            torch_dtype=dtype,
            variant=variant,
            low_cpu_mem_usage=False,  # the other way needs `accelerate`, to save megabytes
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise hub_error(name, "VAE", error) from error
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if wrong:
        raise UserError(f"VAE: the weights in {name} do not fit its config.json: {wrong}")
    return autoencoder


def _check_class(config: Path) -> None:
    name = json.loads(config.read_text()).get("_class_name", "AutoencoderKL")
    if name != "AutoencoderKL":
        raise UserError(f"VAE: {config} describes a {name}; VideoAutoencoderKL loads AutoencoderKL.")
