"""From prompts to videos: the one way to sample, for scripts, demos and validation during training.

A video's noise depends on the seed, on its prompt's index and on the sample's, and on nothing else: a batch of two
makes the same videos as two batches of one. (To rounding: a matrix product may sum in another order.) References and what
a long video's segments take over belong to one sample of one call, and nothing is kept from one call to the next.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from opensora.acceleration.cfg_parallel import ParallelPlan, make_parallel_plan, split_guidance
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compiler import compile_pipe, parse_options
from opensora.acceleration.distributed import init_world
from opensora.acceleration.offload import Placement, Policy
from opensora.acceleration.patching import wrap_forward
from opensora.acceleration.step_cache import StepCache, build_step_cache
from opensora.config.load import InferenceConfig
from opensora.inference.build import build_components, calls_parts, inference_config
from opensora.inference.mask_strategy import apply
from opensora.inference.memory import oom_report, tile_images, warn_if_short
from opensora.inference.prompts import PromptItem, as_items
from opensora.inference.references import (
    NO_CONDITIONING,
    Conditioning,
    alignment,
    encode_references,
    placed_frames,
)
from opensora.inference.sizes import Overlap, VideoSize, overlap, video_size, warn_outside_training
from opensora.inference.text import condition, null_condition
from opensora.models.text_encoder.classes import check_classes
from opensora.schedulers.sampling import SamplingStep
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar
from opensora.utils.seed import generator, randn_like

logger = logging.getLogger(__name__)

OnStep = Callable[[SamplingStep], object]
OnPhase = Callable[[Literal["text", "denoising", "decoding"]], object]
Cond = dict[str, Tensor]  # conditions of the denoiser by name
MOTION_FLOW = 5.0  # default of NOVA's pipelines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A batch of videos of one size.

    Attributes:
        items: B prompts; their order does not matter for what is made of each.
        conditioning: what each starts from; empty: from noise alone.
        align: latent frames to whose multiples references are moved; None: the VAE's chunks.
        num_frames: of a segment, which the VAE takes.
        image_size: (height, width) in pixels, multiples of the VAE's factor.
        fps: frame rate that conditions the model.
        seed: with an item's index and `sample_index` it fixes the noise; an item's own seed wins.
        sample_index: which of several videos of the same prompts.
        guidance_scale: None = the scheduler's own.
        loop: segments of a long video, each continuing the one before.
        condition_frame_length: latent frames that they share; None: about a quarter, see `opensora.inference.sizes.overlap`.
        condition_frame_edit: from which noise level on the shared frames are edited; 0 keeps them.
    """

    items: Sequence[PromptItem]
    num_frames: int
    image_size: tuple[int, int]
    fps: float
    seed: int
    conditioning: Sequence[Conditioning] = ()
    align: int | None = None
    sample_index: int = 0
    guidance_scale: float | None = None
    loop: int = 1
    condition_frame_length: int | None = None
    condition_frame_edit: float = 0.0

    def __post_init__(self) -> None:
        if not self.items or (self.conditioning and len(self.conditioning) != len(self.items)):
            raise ValueError(f"{len(self.items)} prompts with {len(self.conditioning)} sets of references.")
        if self.loop < 1 or not 0 <= self.condition_frame_edit < 1:
            raise UserError(
                f"loop={self.loop}, condition_frame_edit={self.condition_frame_edit}: loop is at least 1, the other in [0, 1)."
            )
        for item, start in zip(self.items, self.starts, strict=True):
            loops = [("a text", segment.loop) for segment in item.segments]
            loops += [("a condition", condition.loop) for condition in start.conditions]
            if late := [name for name, loop in loops if loop >= self.loop]:
                raise UserError(
                    f"prompt {item.index}: {late[0]} of a loop that is not made: there are {self.loop}, counted from 0; raise "
                    "--loop, or take it out."
                )

    @property
    def starts(self) -> Sequence[Conditioning]:
        """The conditioning of each item."""
        return self.conditioning or [NO_CONDITIONING] * len(self.items)

    @property
    def ids(self) -> list[tuple[int, int]]:
        """Seed and index of each item."""
        return [(operator.index(item.overrides.get("seed", self.seed)), item.index) for item in self.items]

    def texts(self, loop: int) -> list[str]:
        """The prompts of a segment."""
        return [item.text_at(loop) for item in self.items]


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
        image_encoder: for denoisers that read features of images.
        device: where everything works.
        dtype: of the denoiser's matrix products (autocast); the sampler computes in fp32.
        offload: where weights are while they are not used: see `opensora.acceleration.offload`. None: the parts are where they
            belong, and nothing moves them, as those of a training.
        plan: the processes that make a video together; all of them must make the same calls.
        step_cache: reuse between steps, installed; see `opensora.acceleration.step_cache`.
        defaults, seed: for what a call leaves out; None: a call leaves nothing out.
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
        image_encoder: Any = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "fp32",
        offload: Policy | None = "none",
        plan: ParallelPlan | None = None,
        step_cache: StepCache | None = None,
        defaults: VideoSize | None = None,
        seed: int | None = None,
        motion_flow: float = MOTION_FLOW,
    ) -> None:
        check_classes(text_encoder, model)
        if hasattr(model, "check_parts"):
            model.check_parts(vae, image_encoder)
        self.model, self.vae, self.text_encoder, self.scheduler = model, vae, text_encoder, scheduler
        self.image_encoder = image_encoder
        self.frames_are_channels = (
            getattr(model, "condition_channels", 0) > 0
        )  # conditioning frames, which else are in z
        self.device = torch.device(device)
        self.dtype = to_torch_dtype(dtype)
        self.plan = ParallelPlan() if plan is None else plan
        self.step_cache = step_cache
        self._defaults, self.seed = defaults, seed
        self.motion_flow = motion_flow
        self._warned_of_guidance = False
        parts = {"model": model, "vae": vae, "text_encoder": text_encoder, "image_encoder": image_encoder}
        self.place = Placement({} if offload is None else parts, self.device, offload or "none")

    @property
    def defaults(self) -> VideoSize:
        """The size of the config that the pipeline was built from."""
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
        world = init_world(cfg.device)
        device = world.device if device is None else torch.device(device)
        components = build_components(cfg, device if device.type == "cuda" and cfg.offload == "none" else None)
        model, vae, _, scheduler, image_encoder = components
        size = video_size(cfg, vae, model.patch_size)
        warn_outside_training(size, cfg.model.get("from_pretrained"))
        whole_model = {"cfg_parallel": cfg.cfg_parallel, "sp_size": cfg.sp_size > 1, "step_cache": cfg.step_cache}
        if calls_parts(scheduler) and (found := [name for name, value in whole_model.items() if value]):
            raise UserError(
                f"{found[0]} has no effect with {type(scheduler).__name__}, which calls the model's parts one by one: leave it out."
            )
        plan = make_parallel_plan(world, cfg.sp_size, cfg_parallel=cfg.cfg_parallel) if plan is None else plan
        if plan.cfg_group is not None and scheduler.cfg_scale == 1:
            raise UserError("cfg_parallel has no effect with cfg_scale=1: there is no guidance to share.")
        if plan.cfg_group is not None and scheduler.guidance.batching != "joint":
            raise UserError(
                f"cfg_parallel has no effect with scheduler.guidance.batching={scheduler.guidance.batching!r}; leave one of "
                "them out."
            )
        if plan.sp_group is not None:
            from opensora.acceleration.sequence_parallel import parallelise

            parallelise(model, plan.sp_group)
        if cfg.vae_tiling is not None:
            tile_images(vae, cfg.vae_tiling)
        blocks, cache = model.transformer_blocks(), build_step_cache(cfg.step_cache, model, plan.groups)
        cached_inside = cache is not None and cache.inside_blocks
        if cache is not None and cached_inside:
            cache.install(blocks, compiled=cfg.compile)
        if cfg.compile and cache is None and cfg.offload != "block":
            compile_blocks(blocks)
        elif cfg.compile:
            for block in blocks:  # only what they compute: what comes around them is decided in Python
                wrap_forward(block, lambda forward: torch.compile(forward, fullgraph=not cached_inside))
        pipeline = cls(
            *components[:4],
            image_encoder=image_encoder,
            device=device,
            dtype=cfg.dtype,
            offload=cfg.offload,
            plan=plan,
            step_cache=cache,
            defaults=size,
            seed=cfg.seed,
            motion_flow=MOTION_FLOW if cfg.motion_flow is None else cfg.motion_flow,
        )
        if cache is not None and not cached_inside:
            cache.install(blocks)  # around what brings the blocks to the device
        if cfg.compiler is not None:
            compile_pipe(pipeline, backend=cfg.compiler, options=cfg.compiler_config)
        return pipeline

    def __call__(
        self,
        prompts: Sequence[str | PromptItem],
        *,
        prompt_indices: Sequence[int] | None = None,
        negative_prompts: Sequence[str | None] | str | None = None,
        progress: bool = False,
        on_step: OnStep | None = None,
        **request: Any,
    ) -> Tensor:
        """Sample one video for each prompt.

        Args:
            prompts: B prompts, or items with all that belongs to a prompt.
            prompt_indices: fix the noise, together with `seed` and `sample_index`; None: 0, 1, ... B - 1.
            negative_prompts: what to steer away from: one for all, or one for each; None: the model's "no text".
            progress: show a bar over the sampling steps.
            on_step: called after each step, for previews; what it raises ends the sampling.
            request: other fields of `Request`. `num_frames`, `image_size`, `fps` and `seed` are by default those of the config
                that the pipeline was built from; the fps of one frame, an image, is 120, as in training.

        Returns:
            Videos [B, 3, T, H, W] in [-1, 1], fp32, on the CPU; T is `num_frames`, more for a long video.

        Raises:
            UserError: the size is none that the VAE can make, the device's memory does not suffice, or a result is not finite.
        """
        request = {name: value for name, value in request.items() if value is not None}
        if not {"num_frames", "image_size", "fps", "seed"} <= request.keys():
            size = self.defaults._replace(**{k: request[k] for k in ("num_frames",) if k in request})
            request = {**size._asdict(), "fps": size.model_fps, "seed": self.seed, **request}
            del request["save_fps"]
        items = as_items(prompts, prompt_indices, negative_prompts)
        video = self.sample(Request(items=items, **request), progress=progress, on_step=on_step).video
        assert video is not None, "decoding is asked for"
        return video

    @torch.no_grad()
    def sample(
        self,
        request: Request,
        *,
        progress: bool = False,
        on_step: OnStep | None = None,
        on_phase: OnPhase = lambda phase: None,
        decode: bool = True,
    ) -> Samples:
        """Sample one video for each item of a request.

        Args:
            request: what to make.
            progress, on_step: see `__call__`.
            on_phase: called when the text is about to be encoded, and when a segment is about to be denoised or decoded.
            decode: False leaves the latents as they are, for processes whose leader decodes.

        Raises:
            UserError: as `__call__`.
        """
        if needs_null(self.scheduler, request.guidance_scale):
            if getattr(self.model, "condition", None) == "unconditional":
                if not self._warned_of_guidance:
                    logger.warning("cfg_scale has no effect: the model is unconditional; sampling without guidance.")
                self._warned_of_guidance = True
                request = dataclasses.replace(request, guidance_scale=1.0)
        elif any(item.negative_prompt is not None for item in request.items):
            raise UserError("negative_prompt has no effect with cfg_scale=1; raise --cfg-scale, or leave it out.")
        latent_size = self.vae.latent_size((request.num_frames, *request.image_size))
        shared = None
        if request.loop > 1:
            shared = overlap(self.vae, request.num_frames, request.condition_frame_length)
        if self.frames_are_channels:  # before anything is sampled
            self._check_given(request, shared)
        size = (len(request.items), request.num_frames, request.image_size)
        with _evaluating(self.model, self.vae, self.text_encoder, self.image_encoder), oom_report(self, *size):
            warn_if_short(self, *size, request.guidance_scale)
            calls: Any = {"progress": progress, "on_step": on_step, "on_phase": on_phase}
            segments = self._segments(request, latent_size, shared, **calls, decode=decode)
            latents, videos = zip(*segments, strict=True)
        if not decode:
            return Samples(None, list(latents))
        video = torch.cat([part for part in videos if part is not None], dim=2)
        self._check_finite(video, "frames", request, 0)
        return Samples(video.clamp_(-1, 1), list(latents))

    def _segments(
        self,
        request: Request,
        latent_size: tuple[int, int, int],
        shared: Overlap | None,
        *,
        progress: bool,
        on_step: OnStep | None,
        on_phase: OnPhase,
        decode: bool,
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The latents of each segment, and those of its frames that are new, if they are decoded."""
        on_phase("text")
        conds = self._conditions(request, progress=progress)
        references = [] if self.frames_are_channels else self._references(request)
        conditions = [start.conditions for start in request.starts]
        taken: Tensor | None = None  # what a segment begins with: latents [B, C, L, h, w], or pixels [B, 3, P, H, W]
        for loop in range(request.loop):
            later = () if loop == 0 else ("loop", loop)  # the first segment is what the video alone would be
            generators = [
                generator(seed, "inference", index, request.sample_index, *later) for seed, index in request.ids
            ]
            noise = torch.empty(len(request.items), self.vae.out_channels, *latent_size, device=self.device)
            align = alignment(self.vae, request.align)
            cond, null = conds[loop]
            z, mask = randn_like(noise, generators), None
            if self.frames_are_channels:
                cond = {**cond, **self._image_condition(request, loop, taken)}
            else:
                z, mask = apply(conditions, references, z, loop=loop, align=align)
                if taken is not None:
                    z, mask = begin_with(taken, z, mask, request.condition_frame_edit)
            scale = request.guidance_scale
            on_phase("denoising")
            with self.place.using("model"):
                z = self._denoised(z, mask, cond, null, scale, generators, progress=progress, on_step=on_step)
            self._check_finite(z, "latents", request, loop)
            ahead = shared if loop + 1 < request.loop else None
            keeps_latents = ahead is not None and ahead.keeps_latents and not self.frames_are_channels
            video = None
            if decode or (ahead is not None and not keeps_latents):
                on_phase("decoding")
                with self.place.using("vae"):  # one at a time, for pixels take far more memory than latents
                    shown = progress_bar(z, desc="decoding", unit="video", disable=not progress)
                    rows = [self.vae.decode(one[None], request.num_frames).float().cpu() for one in shown]
                video = torch.cat(rows)  # [B, 3, T, H, W]
            if ahead is not None and keeps_latents:
                taken = z[:, :, -ahead.latent_frames :]
            elif ahead is not None:
                assert video is not None, "frames are decoded where latents cannot be taken over"
                end = video[:, :, -ahead.num_frames :].clamp(-1, 1)
                if self.frames_are_channels:
                    taken = self.plan.broadcast(end.to(self.device))
                else:
                    taken = self._encoded_end(end, request, loop)
            if video is not None and shared is not None and loop > 0:
                video = video[:, :, shared.num_frames :]
            yield z.cpu(), video if decode else None

    def _conditions(self, request: Request, *, progress: bool) -> list[tuple[Cond, Cond | None]]:
        """For each segment the model's conditions, and what guidance steers away from."""
        height, width = request.image_size
        known = {"fps": request.fps, "height": height, "width": width, "num_frames": request.num_frames}
        known["flow"] = self.motion_flow
        numbers = {name: known[name] for name in self.model.micro_conditions}
        negatives = [item.negative_prompt for item in request.items]
        conds: list[tuple[Cond, Cond | None]] = []
        with self.place.using("text_encoder"):  # the model's own "no text" is computed where the model is
            for loop in progress_bar(range(request.loop), desc="encoding text", unit="text", disable=not progress):
                if conds and request.texts(loop) == request.texts(loop - 1):
                    conds.append(conds[-1])
                    continue
                cond, null = condition(self.text_encoder, request.texts(loop), numbers, self.device), None
                if needs_null(self.scheduler, request.guidance_scale):
                    null = null_condition(self.model, self.text_encoder, cond, negatives)
                conds.append((cond, null))
        return conds

    def _references(self, request: Request) -> list[list[Tensor]]:
        """The latents [C, t, h, w] of each sample's references, on the device."""
        latents, mode = [], getattr(self.model, "conditions_on_mode", False)
        with self.place.using("vae"):
            for (seed, index), start in zip(request.ids, request.starts, strict=True):
                encoded: list[Tensor] = []
                if start.references:
                    options: Any = {"mode": mode, "device": self.device}
                    encoded = encode_references(self.vae, start.references, seed, index, **options)
                latents.append([self.plan.broadcast(z) for z in encoded])
        return latents

    def _check_given(self, request: Request, shared: Overlap | None) -> None:
        """Raise a `UserError` where a segment lacks frames that the model needs, or is to begin with edited ones."""
        if request.condition_frame_edit:
            raise UserError("condition_frame_edit: this model reads the shared frames as they are; leave it out.")
        for loop in range(request.loop):
            given = self._given(request, loop)[1]
            if loop > 0 and shared is not None:
                given[:, : shared.num_frames] = True
            if not given.any(dim=1).all():
                raise UserError(
                    "this model makes videos from images: set --image, or reference_path and mask_strategy."
                )
            self.model.check_given(given)

    def _given(self, request: Request, loop: int) -> tuple[list[list[tuple[Tensor, int]]], Tensor]:
        """The pixels of a segment's references with their first frame, and which frames they are: [B, F] bool."""
        given = torch.zeros(len(request.items), request.num_frames, dtype=torch.bool)
        align = alignment(self.vae, request.align)
        placed = [placed_frames(s, self.vae, request.num_frames, loop=loop, align=align) for s in request.starts]
        for b, frames in enumerate(placed):
            for pixels, begin in frames:
                given[b, begin : begin + pixels.shape[1]] = True
        return placed, given

    def _image_condition(self, request: Request, loop: int, taken: Tensor | None) -> Cond:
        """The condition of a segment on its references' frames, and on those `taken [B, 3, P, H, W]` over, which win."""
        placed, given = self._given(request, loop)
        video = torch.zeros(len(placed), 3, request.num_frames, *request.image_size, device=self.device)
        for b, frames in enumerate(placed):
            for pixels, begin in frames:
                video[b, :, begin : begin + pixels.shape[1]] = pixels.to(video)
        if taken is not None:
            video[:, :, : taken.shape[2]], given[:, : taken.shape[2]] = taken, True
        with self.place.using("vae"), self.place.using("image_encoder"):
            condition = self.model.image_condition(self.vae, video, given.to(self.device), self.image_encoder)
        return {name: self.plan.broadcast(value) for name, value in condition.items()}

    def _encoded_end(self, end: Tensor, request: Request, loop: int) -> Tensor:
        """Latents [B, C, L, h, w] of the last frames [B, 3, P, H, W] of a segment."""
        with self.place.using("vae"):
            if getattr(self.model, "conditions_on_mode", False):
                rows = [self.vae.mode(self.vae.moments(frames[None].to(self.device))) for frames in end]
            else:
                rngs = [generator(seed, "overlap", i, request.sample_index, loop) for seed, i in request.ids]
                rows = [self.vae.encode(end[b : b + 1].to(self.device), [rng]) for b, rng in enumerate(rngs)]
        return self.plan.broadcast(torch.cat(rows))

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
            rows = []
            for b in range(len(z)):
                row = slice(b, b + 1)
                own_mask = None if mask is None else mask[row]
                own_cond = {name: value[row] for name, value in cond.items()}
                own_null = None if null is None else {name: value[row] for name, value in null.items()}
                own = (z[row], own_mask, own_cond, own_null, guidance_scale, generators[row])
                rows.append(self._denoised(*own, progress=progress, on_step=on_step))
            return torch.cat(rows)
        model: Any = self._denoise
        if calls_parts(self.scheduler):  # each part under autocast
            model = self.model
        elif self.plan.cfg_group is not None:
            model = split_guidance(model, self.plan.cfg_group, len(z))
        steps = self.scheduler.sample_steps(
            model, z, cond, null=null, mask=mask, guidance_scale=guidance_scale, generators=generators
        )
        total = getattr(self.scheduler, "num_sampling_steps", None)  # some schedulers' first step says another
        timesteps: Sequence[float] = ()
        if cache is not None:
            timesteps = scale_to_1000(self.scheduler, self.scheduler.solver(z, generators).timesteps)
        x = z
        # closed also where `on_step` raises: the exception's traceback holds on to the steps, and they to cast weights
        with (
            closing(steps) if isinstance(steps, Generator) else nullcontext(),
            nullcontext() if cache is None else cache.sampling(timesteps),
            progress_bar(total=total, desc="sampling", unit="step", disable=not progress) as bar,
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

    def _check_finite(self, values: Tensor, what: str, request: Request, loop: int) -> None:
        """Raise a `UserError` that names the prompts for which `values [B, ...]` are not finite."""
        bad = [b for b, row in enumerate(values) if not row.isfinite().all()]
        if not bad:
            return
        texts, (height, width) = request.texts(loop), request.image_size
        names = "; ".join(f"prompt {request.items[b].index} {texts[b][:80]!r}" for b in bad)
        scale = self.scheduler.cfg_scale if request.guidance_scale is None else request.guidance_scale
        raise UserError(
            f"{what} are not finite (NaN or infinite) for {names} ({request.num_frames} frames of {height}x{width}, "
            f"{str(self.dtype).removeprefix('torch.')}, {getattr(self.scheduler, 'num_sampling_steps', '?')} steps of "
            f"{type(self.scheduler).__name__}, guidance {scale}). Nothing is saved for this batch. Try --dtype fp32 or a lower "
            "--cfg-scale; if that does not help, the checkpoint is broken."
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


def begin_with(taken: Tensor, z: Tensor, mask: Tensor | None, edit_ratio: float) -> tuple[Tensor, Tensor]:
    """A segment's initial z and mask with the frames that it takes over.

    Args:
        taken: [B, C, L, h, w] latents of the end of the segment before.
        z: [B, C, t, h, w] noise, perhaps with other conditioning frames; it is not changed.
        mask: [B, t] of those, or None; the frames taken over win, which is logged.
        edit_ratio: 0 keeps them, above 0 they are edited from that noise level on.

    Returns:
        z, and a mask [B, t]: bool, or fp32 where frames are edited.
    """
    length = taken.shape[2]
    z = z.clone()
    z[:, :, :length] = taken.to(z)
    if mask is None:
        mask = torch.ones(z.shape[0], z.shape[2], dtype=torch.bool, device=z.device)
    if lost := int((mask[:, :length] < 1).sum()):
        logger.warning("%d latent frames of references have no effect: they lie in what a loop takes over.", lost)
    mask = mask.float() if edit_ratio else mask.clone()
    mask[:, :length] = edit_ratio
    return z, mask


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
