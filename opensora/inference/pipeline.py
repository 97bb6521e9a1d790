"""From prompts to videos: the one way to sample, for scripts, demos and validation during training.

A video's noise depends on the seed, on its prompt's index and on the sample's, and on nothing else: a batch of two
makes the same videos as two batches of one. (To rounding: a matrix product may sum in another order.) References and what
a long video's segments take over belong to one sample of one call, and nothing is kept from one call to the next.
"""

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from opensora.acceleration.cfg_parallel import ParallelPlan, make_parallel_plan, split_guidance
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compiler import compile_pipe, parse_options
from opensora.acceleration.distributed import init_world
from opensora.acceleration.offload import Placement, Policy
from opensora.acceleration.patching import wrap_forward
from opensora.acceleration.step_cache import StepCache, build_step_cache
from opensora.config.load import InferenceConfig
from opensora.datasets.video.files import IMAGE_FPS
from opensora.inference.build import build_parts, calls_parts, inference_config
from opensora.inference.conditions import condition, null_condition
from opensora.inference.long_video import Overlap, begin_with, overlap
from opensora.inference.mask_strategy import apply
from opensora.inference.memory import oom_report, tile_images, warn_if_short
from opensora.inference.prompts import PromptItem
from opensora.inference.references import Conditioning, alignment, encode_references
from opensora.inference.request import Request, as_items
from opensora.inference.sizes import check_size, video_size, warn_outside_training
from opensora.models.text_encoder.classes import check_classes
from opensora.schedulers.sampling import SamplingStep
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, randn_like

logger = logging.getLogger(__name__)

OnStep = Callable[[SamplingStep], object]
Cond = dict[str, Tensor]  # conditions of the denoiser by name
MOTION_FLOW = 5.0  # default of NOVA's pipelines


class Defaults(NamedTuple):
    """Settings for what a call leaves out."""

    num_frames: int
    image_size: tuple[int, int]
    fps: float  # conditions the model
    save_fps: float  # of the file
    seed: int
    video_fps: float | None = (
        None  # conditions the model where a call asks for several frames, and these defaults for one
    )


class Samples(NamedTuple):
    """What sampling gives."""

    video: Tensor | None  # [B, 3, T, H, W] in [-1, 1], fp32, on the CPU; None where decoding was not asked for
    latents: list[Tensor]  # of each segment, [B, C, t, h, w], fp32, on the CPU


class VideoPipeline:
    """Samples videos from the four parts of a latent diffusion model.

        from opensora.inference.output import save_sample
        from opensora.inference.pipeline import VideoPipeline

        pipeline = VideoPipeline.from_pretrained("configs/quickstart/inference.py")
        save_sample(pipeline(["a white dog on the floor"])[0], "dog", fps=pipeline.defaults.save_fps)

    Args:
        model: a denoiser; its weights keep their dtype.
        vae: decodes the latents.
        text_encoder: encodes the prompts.
        scheduler: the sampler, with its number of steps and guidance.
        device: where everything works.
        dtype: of the denoiser's matrix products (autocast); the sampler computes in fp32.
        offload: where weights are while they are not used: see `opensora.acceleration.offload`.
        plan: the processes that make a video together; all of them must make the same calls.
        step_cache: reuse between steps, installed; see `opensora.acceleration.step_cache`.
        defaults: settings for what a call leaves out; None: a call leaves nothing out.
        motion_flow: the optical-flow score, for models conditioned on it (NOVA).

    Raises:
        UserError: text encoder and denoiser disagree: classes or text, or how many classes.
    """

    def __init__(  # noqa: PLR0913  (what a pipeline is made from; keyword-only)
        self,
        model: Any,
        vae: Any,
        text_encoder: Any,
        scheduler: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "fp32",
        offload: Policy = "none",
        plan: ParallelPlan | None = None,
        step_cache: StepCache | None = None,
        defaults: Defaults | None = None,
        motion_flow: float = MOTION_FLOW,
    ) -> None:
        check_classes(text_encoder, model)
        self.model, self.vae, self.text_encoder, self.scheduler = model, vae, text_encoder, scheduler
        self.device = torch.device(device)
        self.dtype = to_torch_dtype(dtype)
        self.plan = ParallelPlan() if plan is None else plan
        self.step_cache = step_cache
        self._defaults = defaults
        self.motion_flow = motion_flow
        self._warned_of_guidance = False
        self.place = Placement({"model": model, "vae": vae, "text_encoder": text_encoder}, self.device, offload)

    @property
    def defaults(self) -> Defaults:
        """Those of the config that the pipeline was built from."""
        if self._defaults is None:
            raise ValueError("this pipeline was not built from a config: the call must give size, rate and seed.")
        return self._defaults

    @classmethod
    def from_pretrained(
        cls, source: str | Path, device: torch.device | str | None = None, **changes: Any
    ) -> "VideoPipeline":
        """The pipeline of a config file or of a checkpoint folder of ours.

            VideoPipeline.from_pretrained("configs/opensora/inference/16x256x256.py", ckpt_path="W", num_frames=32)

        Args:
            source: see `opensora.inference.build.inference_config`.
            device: None = the GPU when there is one.
            changes: other values of the config's fields; `ckpt_path`, `cfg_scale`, ... as on the command line.

        Raises:
            UserError: the settings are wrong, or a part cannot be built.
        """
        return cls.from_config(inference_config(source, changes), device)

    @classmethod
    def from_config(
        cls, cfg: InferenceConfig, device: torch.device | str | None = None, plan: ParallelPlan | None = None
    ) -> "VideoPipeline":
        """Build all parts that `cfg` names, on `device` (None = as `cfg.device` says), frozen.

        Args:
            cfg: the settings.
            device: where everything works.
            plan: None = as `cfg.sp_size` and `cfg.cfg_parallel` say, which all processes must ask for together.

        Raises:
            UserError: a part cannot be built, the size is none that the VAE can make, or settings have no effect.
        """
        parse_options(cfg.compiler_config)  # a mistake is reported before minutes of loading
        parts = build_parts(cfg)
        size = video_size(cfg, parts.vae, parts.model.patch_size)
        warn_outside_training(size, cfg.model.get("from_pretrained"))
        whole_model = {"cfg_parallel": cfg.cfg_parallel, "sp_size": cfg.sp_size > 1, "step_cache": cfg.step_cache}
        if calls_parts(parts.scheduler) and (found := [name for name, value in whole_model.items() if value]):
            raise UserError(
                f"{found[0]} has no effect with {type(parts.scheduler).__name__}, which calls the model's parts one by one: "
                "leave it out."
            )
        world = init_world(cfg.device)
        plan = make_parallel_plan(world, cfg.sp_size, cfg_parallel=cfg.cfg_parallel) if plan is None else plan
        device = world.device if device is None else torch.device(device)
        if plan.cfg_group is not None and parts.scheduler.cfg_scale == 1:
            raise UserError("cfg_parallel has no effect with cfg_scale=1: there is no guidance to share.")
        if plan.cfg_group is not None and (batching := parts.scheduler.guidance.batching) != "joint":
            raise UserError(
                f"cfg_parallel has no effect with scheduler.guidance.batching={batching!r}; leave one of them out."
            )
        if plan.sp_group is not None:
            from opensora.acceleration.sequence_parallel import parallelise

            parallelise(parts.model, plan.sp_group)
        if cfg.vae_tiling is not None:
            tile_images(parts.vae, cfg.vae_tiling)
        cache = build_step_cache(cfg.step_cache, parts.model, plan.groups)
        _inside_blocks(parts.model, cache, cfg)
        pipeline = cls(
            *parts,
            device=device,
            dtype=cfg.dtype,
            offload=cfg.offload,
            plan=plan,
            step_cache=cache,
            defaults=Defaults(size.num_frames, size.image_size, size.fps, size.save_fps, cfg.seed, float(cfg.fps)),
            motion_flow=MOTION_FLOW if cfg.motion_flow is None else cfg.motion_flow,
        )
        if cache is not None and not cache.inside_blocks:
            cache.install(parts.model.transformer_blocks())  # around what brings the blocks to the device
        if cfg.compiler is not None:
            compile_pipe(pipeline, backend=cfg.compiler, options=cfg.compiler_config)
        return pipeline

    def __call__(  # noqa: PLR0913  (what a video is made from; keyword-only)
        self,
        prompts: Sequence[str | PromptItem],
        *,
        num_frames: int | None = None,
        image_size: tuple[int, int] | None = None,
        fps: float | None = None,
        seed: int | None = None,
        prompt_indices: Sequence[int] | None = None,
        sample_index: int = 0,
        guidance_scale: float | None = None,
        negative_prompts: Sequence[str | None] | str | None = None,
        conditioning: Sequence[Conditioning] = (),
        align: int | None = None,
        loop: int = 1,
        condition_frame_length: int | None = None,
        condition_frame_edit: float = 0.0,
        progress: bool = False,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Sample one video for each prompt.

        Of the first four, None takes the value of the config that the pipeline was built from.

        Args:
            prompts: B prompts, or items with all that belongs to a prompt.
            num_frames: frames of a video, or of a segment of a long one; one that the VAE takes.
            image_size: (height, width) in pixels; multiples of the VAE's factor.
            fps: frame rate that conditions the model; None: of one frame, an image, it is 120, as in training.
            seed, prompt_indices, sample_index: fix the noise; indices default to 0, 1, ... B - 1.
            guidance_scale: None = the scheduler's own.
            negative_prompts: what to steer away from: one for all, or one for each; None: the model's "no text".
            conditioning: references of each sample, see `opensora.inference.references`.
            align: latent frames to whose multiples references are moved; None: the VAE's chunks.
            loop, condition_frame_length, condition_frame_edit: a long video, see `opensora.inference.long_video`.
            progress: show a bar over the sampling steps.
            on_step: called after each step, for previews; what it raises ends the sampling.

        Returns:
            Videos [B, 3, T, H, W] in [-1, 1], fp32, on the CPU; T is `num_frames`, more for a long video.

        Raises:
            UserError: the size is none that the VAE can make, the device's memory does not suffice, or a result is not finite.
        """
        num_frames = self.defaults.num_frames if num_frames is None else num_frames
        if fps is None and num_frames == 1:
            fps = IMAGE_FPS  # as in training
        elif fps is None:
            fps = self.defaults.fps if self.defaults.video_fps is None else self.defaults.video_fps
        request = Request(
            items=as_items(prompts, prompt_indices, negative_prompts),
            num_frames=num_frames,
            image_size=self.defaults.image_size if image_size is None else image_size,
            fps=fps,
            seed=self.defaults.seed if seed is None else seed,
            conditioning=conditioning,
            align=align,
            sample_index=int(sample_index),
            guidance_scale=guidance_scale,
            loop=loop,
            condition_frame_length=condition_frame_length,
            condition_frame_edit=condition_frame_edit,
        )
        video = self.sample(request, progress=progress, on_step=on_step).video
        assert video is not None, "decoding is asked for"
        return video

    @torch.no_grad()
    def sample(
        self, request: Request, *, progress: bool = False, on_step: OnStep | None = None, decode: bool = True
    ) -> Samples:
        """Sample one video for each item of a request.

        Args:
            request: what to make.
            progress, on_step: see `__call__`.
            decode: False leaves the latents as they are, for processes whose leader decodes.

        Raises:
            UserError: as `__call__`.
        """
        request = self._with_an_effect(request)
        latent_size = check_size(self.vae, request.num_frames, request.image_size)
        shared = None
        if request.loop > 1:
            shared = overlap(self.vae, request.num_frames, request.condition_frame_length)
        with _evaluating(self.model, self.vae, self.text_encoder), oom_report(self, request):
            warn_if_short(self, request, latent_size)
            segments = self._segments(request, latent_size, shared, progress=progress, on_step=on_step, decode=decode)
            latents, videos = zip(*segments, strict=True)
        if not decode:
            return Samples(None, list(latents))
        video = torch.cat([part for part in videos if part is not None], dim=2)
        check_finite(video, "frames", request.texts(0), request.indices, self._settings(request))
        return Samples(video.clamp_(-1, 1), list(latents))

    def _with_an_effect(self, request: Request) -> Request:
        """The request without guidance where the model is unconditional."""
        unconditional = getattr(self.model, "condition", None) == "unconditional"
        if not unconditional or not needs_null(self.scheduler, request.guidance_scale):
            return request
        if not self._warned_of_guidance:
            self._warned_of_guidance = True
            logger.warning("cfg_scale has no effect: the model is unconditional; sampling without guidance.")
        return dataclasses.replace(request, guidance_scale=1.0)

    def _segments(
        self,
        request: Request,
        latent_size: tuple[int, int, int],
        shared: Overlap | None,
        *,
        progress: bool,
        on_step: OnStep | None,
        decode: bool,
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The latents of each segment, and those of its frames that are new, if they are decoded."""
        conds = self._conditions(request)
        references = self._references(request)
        conditions = [start.conditions for start in request.starts]
        taken: Tensor | None = None
        for loop in range(request.loop):
            generators = _generators(request, loop)
            noise = torch.empty(len(request.items), self.vae.out_channels, *latent_size, device=self.device)
            align = alignment(self.vae, request.align)
            z, mask = apply(conditions, references, randn_like(noise, generators), loop=loop, align=align)
            if taken is not None:
                z, mask = begin_with(taken, z, mask, request.condition_frame_edit)
            scale = request.guidance_scale
            with self.place.using("model"):
                z = self._denoised(z, mask, *conds[loop], scale, generators, progress=progress, on_step=on_step)
            check_finite(z, "latents", request.texts(loop), request.indices, self._settings(request))
            again = shared is not None and loop + 1 < request.loop and not shared.keeps_latents
            video = self._decoded(z, request.num_frames) if decode or again else None
            if shared is not None and loop + 1 < request.loop:
                taken = self._taken(z, video, shared, request, loop)
            if video is not None and shared is not None and loop > 0:
                video = video[:, :, shared.num_frames :]
            yield z.cpu(), video if decode else None

    def _conditions(self, request: Request) -> list[tuple[Cond, Cond | None]]:
        """For each segment the model's conditions, and what guidance steers away from."""
        height, width = request.image_size
        known = {"fps": request.fps, "height": height, "width": width, "num_frames": request.num_frames}
        known["flow"] = self.motion_flow
        numbers = {name: known[name] for name in self.model.micro_conditions}
        negatives = [item.negative_prompt for item in request.items]
        guided = needs_null(self.scheduler, request.guidance_scale)
        conds: list[tuple[Cond, Cond | None]] = []
        with self.place.using("text_encoder"):  # the model's own "no text" is computed where the model is
            for loop in range(request.loop):
                if conds and request.texts(loop) == request.texts(loop - 1):
                    conds.append(conds[-1])
                    continue
                cond = condition(self.text_encoder, request.texts(loop), numbers, self.device)
                null = null_condition(self.model, self.text_encoder, cond, negatives, guided=guided)
                conds.append((cond, null))
        return conds

    def _references(self, request: Request) -> list[list[Tensor]]:
        """The latents [C, t, h, w] of each sample's references, on the device."""
        latents = []
        with self.place.using("vae"):
            for item, seed, start in zip(request.items, request.seeds, request.starts, strict=True):
                encoded = encode_references(self.vae, start.references, seed, item.index) if start.references else []
                latents.append([self.plan.broadcast(z) for z in encoded])
        return latents

    def _taken(self, z: Tensor, video: Tensor | None, shared: Overlap, request: Request, loop: int) -> Tensor:
        """What the next segment begins with: [B, C, L, h, w]."""
        if shared.keeps_latents:
            return z[:, :, -shared.latent_frames :]
        assert video is not None, "frames are decoded where latents cannot be taken over"
        end = video[:, :, -shared.num_frames :].clamp(-1, 1)
        ids = zip(request.seeds, request.indices, strict=True)
        with self.place.using("vae"):
            parts = [
                self.vae.encode(
                    frames[None].to(self.device), [generator(seed, "overlap", index, request.sample_index, loop)]
                )
                for frames, (seed, index) in zip(end, ids, strict=True)
            ]
        return self.plan.broadcast(torch.cat(parts))

    def _denoised(
        self,
        z: Tensor,
        mask: Tensor | None,
        cond: Cond,
        null: Cond | None,
        guidance_scale: float | None,
        generators: Sequence[torch.Generator],
        *,
        progress: bool,
        on_step: OnStep | None,
    ) -> Tensor:
        """x_0 of a batch: all at once, or sample by sample for a step cache that looks at the samples."""
        cache = self.step_cache
        if cache is not None and cache.per_sample and len(z) > 1:
            rows = [slice(b, b + 1) for b in range(len(z))]
            one_by_one = [
                self._denoised(
                    z[row],
                    None if mask is None else mask[row],
                    {name: value[row] for name, value in cond.items()},
                    None if null is None else {name: value[row] for name, value in null.items()},
                    guidance_scale,
                    generators[row],
                    progress=progress,
                    on_step=on_step,
                )
                for row in rows
            ]
            return torch.cat(one_by_one)
        model: Any = self._denoise
        if calls_parts(self.scheduler):  # each part under autocast
            model = self.model
        elif self.plan.cfg_group is not None:
            model = split_guidance(model, self.plan.cfg_group, len(z))
        steps = self.scheduler.sample_steps(
            model, z, cond, null=null, mask=mask, guidance_scale=guidance_scale, generators=generators
        )
        timesteps: Sequence[float] = ()
        if cache is not None:
            timesteps = scale_to_1000(self.scheduler, self.scheduler.solver(z, generators).timesteps)
        x = z
        # closed also where `on_step` raises: the exception's traceback holds on to the steps, and they to cast weights
        with (
            closing(steps) if isinstance(steps, Generator) else nullcontext(),
            nullcontext() if cache is None else cache.sampling(timesteps),
            tqdm(disable=not progress) as bar,
        ):
            for index in count():
                if cache is not None and index < len(timesteps):
                    cache.step(index)
                with self._autocast(enabled=calls_parts(self.scheduler)):
                    step = next(steps, None)
                if step is None:
                    return x
                bar.total = step.num_steps
                bar.update()
                if on_step is not None:
                    on_step(step)
                x = step.x
        raise AssertionError("the loop ends with the steps")

    def _autocast(self, *, enabled: bool = True) -> torch.autocast:
        """The dtype of the denoiser's matrix products."""
        enabled = enabled and self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if enabled else None, enabled=enabled)

    def _denoise(self, x: Tensor, timestep: Tensor, y: Tensor, **cond: Tensor | None) -> Tensor:
        """The model under autocast; the prediction is fp32."""
        with self._autocast():
            return self.model(x, timestep, y, **cond).float()

    def _decoded(self, z: Tensor, num_frames: int) -> Tensor:
        """Videos [B, 3, T, H, W] on the CPU; one at a time, for pixels take far more memory than latents."""
        with self.place.using("vae"):
            return torch.cat([self.vae.decode(one[None], num_frames).float().cpu() for one in z])

    def _settings(self, request: Request) -> str:
        """A sampling run in a message."""
        scale = self.scheduler.cfg_scale if request.guidance_scale is None else request.guidance_scale
        height, width = request.image_size
        return (
            f"{request.num_frames} frames of {height}x{width}, {str(self.dtype).removeprefix('torch.')}, "
            f"{self.scheduler.num_sampling_steps} steps of {type(self.scheduler).__name__}, guidance {scale}"
        )


def check_finite(values: Tensor, what: str, prompts: Sequence[str], indices: Sequence[int], settings: str) -> None:
    """Raise a `UserError` that names the prompts for which `values [B, ...]` are not finite."""
    bad = [b for b, row in enumerate(values) if not row.isfinite().all()]
    if bad:
        names = "; ".join(f"prompt {indices[b]} {prompts[b][:80]!r}" for b in bad)
        raise UserError(
            f"{what} are not finite (NaN or infinite) for {names} ({settings}). Nothing is saved for this batch. "
            "Try --dtype fp32 or a lower --cfg-scale; if that does not help, the checkpoint is broken."
        )


def needs_null(scheduler: Any, guidance_scale: float | None = None) -> bool:
    """Whether a sampler wants a prediction without text; one with further kinds of guidance (NOVA's) decides itself.

    Args:
        scheduler: the sampler.
        guidance_scale: None = its own.
    """
    if hasattr(scheduler, "needs_null"):
        return bool(scheduler.needs_null(guidance_scale))
    return bool((scheduler.cfg_scale if guidance_scale is None else guidance_scale) != 1)


def scale_to_1000(scheduler: Any, timesteps: Sequence[float]) -> list[float]:
    """Timesteps on the scale 0 to 1000, on which step caches are set, whatever the scheduler counts to."""
    last = getattr(scheduler, "num_timesteps", None)
    if last is None and hasattr(scheduler, "diffusion_steps"):
        last = scheduler.diffusion_steps * (scheduler.time_scale or 1)
    return [1000 * t / (last or 1000) for t in timesteps]


def _generators(request: Request, loop: int) -> list[torch.Generator]:
    """One for each sample; the first segment of a long video is what the video alone would be."""
    later = () if loop == 0 else ("loop", loop)
    ids = zip(request.seeds, request.indices, strict=True)
    return [generator(seed, "inference", index, request.sample_index, *later) for seed, index in ids]


def _inside_blocks(model: Any, cache: StepCache | None, cfg: InferenceConfig) -> None:
    """Put a step cache around layers, and compile the blocks around it; without one, compile them as they are."""
    blocks = model.transformer_blocks()
    inside = cache is not None and cache.inside_blocks
    if cache is not None and inside:
        cache.install(blocks, compiled=cfg.compile)
    if not cfg.compile:
        return
    if cache is None and cfg.offload != "block":
        compile_blocks(blocks)
        return
    for block in blocks:  # only what they compute: what comes around them is decided in Python
        wrap_forward(block, lambda forward: torch.compile(forward, fullgraph=not inside))


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
