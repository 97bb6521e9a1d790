"""From prompts to videos: the one way to sample, for scripts, demos and validation during training.

A video's noise depends on the seed, on its prompt's index and on the sample's, and on nothing else: a batch of two
makes the same videos as two batches of one. (To rounding: a matrix product may sum in another order.)
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import init_world
from opensora.models.class_condition import check_classes
from opensora.registry import MODELS, SCHEDULERS, Registry, build_module
from opensora.utils.config import InferenceConfig
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, randn_like


class VideoPipeline:
    """Samples videos from the four parts of a latent diffusion model.

        cfg = parse_config(InferenceConfig, argv=["configs/opensora/inference/16x256x256.py", "--ckpt-path", "W"])
        pipeline = VideoPipeline.from_config(cfg)
        video = pipeline(["a calm lake at dawn"], num_frames=16, image_size=(256, 256), fps=8, seed=42)  # [1, 3, T, H, W]
        save_sample(video[0], "lake", fps=8)

    Args:
        model: a denoiser; its weights keep their number format.
        vae: decodes the latents.
        text_encoder: encodes the prompts.
        scheduler: the sampler, with its number of steps and guidance.
        device: where everything is moved.
        dtype: number format of the denoiser's matrix products (autocast); the sampler computes in fp32.

    Raises:
        UserError: text encoder and denoiser do not mean the same: classes or text, and how many classes.
    """

    def __init__(
        self,
        model: Any,
        vae: Any,
        text_encoder: Any,
        scheduler: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "fp32",
    ) -> None:
        check_classes(text_encoder, model)
        self.device = torch.device(device)
        self.dtype = to_torch_dtype(dtype)
        self.model, self.vae, self.text_encoder = (_to(part, self.device) for part in (model, vae, text_encoder))
        self.scheduler = scheduler

    @classmethod
    def from_config(cls, cfg: InferenceConfig, device: torch.device | str | None = None) -> "VideoPipeline":
        """Build all parts that `cfg` names, on `device` (None = as `cfg.device` says), frozen.

        Raises:
            UserError: a part cannot be built, or the size is none that the VAE can make.
        """
        vae = _build(cfg.vae, MODELS)
        check_size(vae, cfg.num_frames, cfg.image_size)  # before minutes of loading
        text_encoder = _build(cfg.text_encoder, MODELS)
        model = _build(
            cfg.model,
            MODELS,
            in_channels=vae.out_channels,
            caption_channels=text_encoder.output_dim,
            model_max_length=text_encoder.model_max_length,
        )
        if cfg.model.get("from_pretrained") is None:
            warnings.warn("the model has random weights; name a checkpoint with --ckpt-path.", stacklevel=2)
        for part in (model, vae, text_encoder):
            part.requires_grad_(False).eval()
        if cfg.compile:
            compile_blocks(model.transformer_blocks())
        scheduler = _build(cfg.scheduler, SCHEDULERS)
        device = init_world(cfg.device).device if device is None else device
        return cls(model, vae, text_encoder, scheduler, device=device, dtype=cfg.dtype)

    @torch.no_grad()
    def __call__(  # noqa: PLR0913  (what a video is made from; keyword-only)
        self,
        prompts: Sequence[str],
        *,
        num_frames: int,
        image_size: tuple[int, int],
        fps: float,
        seed: int,
        prompt_indices: Sequence[int] | None = None,
        sample_index: int = 0,
        guidance_scale: float | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Sample one video for each prompt.

        Args:
            prompts: B prompts.
            num_frames: frames of a video; one that the VAE takes.
            image_size: (height, width) in pixels; multiples of the VAE's factor.
            fps: frame rate that the model is told.
            seed, prompt_indices, sample_index: fix the noise; indices default to 0, 1, ... B - 1.
            guidance_scale: None = the scheduler's own.
            progress: show a bar over the sampling steps.

        Returns:
            Videos [B, 3, T, H, W] in [-1, 1], fp32, on the CPU.

        Raises:
            UserError: the size is none that the VAE can make, or a result is not finite.
        """
        indices = range(len(prompts)) if prompt_indices is None else prompt_indices
        if isinstance(prompts, str) or not prompts or len(indices) != len(prompts):
            raise ValueError(f"expected a list of prompts, one index for each; got {prompts!r}, {indices!r}.")
        latent_size = check_size(self.vae, num_frames, image_size)
        generators = [generator(seed, "inference", int(i), int(sample_index)) for i in indices]
        z = randn_like(
            torch.empty(len(prompts), self.vae.out_channels, *latent_size, device=self.device), generators
        )  # [B, C, t, h, w]
        settings = (
            f"{num_frames} frames of {image_size[0]}x{image_size[1]}, {_short_name(self.dtype)}, "
            f"{_sampler_settings(self.scheduler, guidance_scale)}"
        )
        with _evaluating(self.model, self.vae, self.text_encoder):
            cond = self._conditions(prompts, num_frames, image_size, fps)
            z = self.scheduler.sample(
                self._denoise,
                z,
                cond,
                null=self._null(cond, guidance_scale),
                guidance_scale=guidance_scale,
                generators=generators,
                progress=progress,
            )
            check_finite(z, "latents", prompts, indices, settings)
            # one at a time: pixels take far more memory than latents
            video = torch.cat([self.vae.decode(one[None], num_frames).float().cpu() for one in z])
        check_finite(video, "frames", prompts, indices, settings)
        return video.clamp_(-1, 1)

    def _null(self, cond: dict[str, Tensor], guidance_scale: float | None) -> dict[str, Tensor] | None:
        """The condition of "no text"; None where guidance does not ask for it, since not every model has one."""
        scale = getattr(self.scheduler, "cfg_scale", None) if guidance_scale is None else guidance_scale
        if scale == 1:
            return None
        return {"y": self.model.null_condition(len(cond["y"])).to(cond["y"])}

    def _denoise(self, x: Tensor, timestep: Tensor, y: Tensor, **cond: Tensor) -> Tensor:
        """The model under autocast; the prediction is fp32."""
        enabled = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype if enabled else None, enabled=enabled):
            return self.model(x, timestep, y, **cond).float()

    def _conditions(
        self, prompts: Sequence[str], num_frames: int, image_size: tuple[int, int], fps: float
    ) -> dict[str, Tensor]:
        """Text features `y [B, 1, L, D]`, their `mask [B, L]`, and the numbers [B], fp32."""
        text = self.text_encoder.encode(list(prompts))
        numbers = {"fps": fps, "height": image_size[0], "width": image_size[1], "num_frames": num_frames}
        vectors = {
            name: torch.full((len(prompts),), float(value), device=self.device) for name, value in numbers.items()
        }
        return {"y": text.y.to(self.device), "mask": text.mask.to(self.device), **vectors}


def check_size(vae: Any, num_frames: int, image_size: tuple[int, int]) -> tuple[int, int, int]:
    """The latent size (t, h, w) of a video.

    Raises:
        UserError: the VAE makes no such video; the message names the nearest that it makes.
    """
    legal = vae.legal_num_frames(num_frames)
    if legal != num_frames:
        raise UserError(
            f"num_frames={num_frames}: this VAE does not make videos of that length; the nearest is {legal}."
        )
    return vae.latent_size((num_frames, *image_size))


def check_finite(values: Tensor, what: str, prompts: Sequence[str], indices: Sequence[int], settings: str) -> None:
    """Raise a `UserError` that names the prompts for which `values [B, ...]` are not finite."""
    bad = [b for b, row in enumerate(values) if not row.isfinite().all()]
    if bad:
        names = "; ".join(f"prompt {indices[b]} {prompts[b][:80]!r}" for b in bad)
        raise UserError(
            f"{what} are not finite (NaN or infinite) for {names} ({settings}). Nothing is saved for this batch. "
            "Try --dtype fp32 or a lower --cfg-scale; if that does not help, the checkpoint is broken."
        )


def _sampler_settings(scheduler: Any, guidance_scale: float | None) -> str:
    """What a message says about the sampler."""
    scale = getattr(scheduler, "cfg_scale", None) if guidance_scale is None else guidance_scale
    return f"{getattr(scheduler, 'num_sampling_steps', '?')} steps of {type(scheduler).__name__}, guidance {scale}"


def _short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to(part: Any, device: torch.device) -> Any:
    return part.to(device) if isinstance(part, nn.Module) else part


def _build(component: dict[str, Any], registry: Registry, **runtime: Any) -> Any:
    try:
        return build_module(component, registry, **runtime)
    except UserError:
        raise
    except ValueError as error:  # how a constructor refuses an argument
        raise UserError(f"{component.get('type')}: {error}") from error


@contextmanager
def _evaluating(*parts: Any) -> Iterator[None]:
    """Put modules in eval mode, and afterwards each submodule back in its own: the model may be in training."""
    before = [(m, m.training) for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
