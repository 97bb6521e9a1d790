"""What the demo page does, without the page: sample one video, report progress, show previews, keep what was made.

Each request has a thread that reads the form, fetches what it names, waits for its turn, samples, and reports what it is at. One
model is in memory: requests take turns at it, in the order in which they are ready, so that nobody waits for another's download, and
a request for another model loads that one in its place.

Whoever can reach the page is a stranger: prompts name only uploads, public addresses, and what the operator named.
"""

import dataclasses
import functools
import gc
import json
import logging
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opensora.config.load import InferenceConfig, config_from_dict, to_dict
from opensora.datasets.video.files import is_image
from opensora.datasets.video.read_video import open_clip, read_indices
from opensora.inference.build import COMPONENTS
from opensora.inference.fetch import fetch, is_url
from opensora.inference.jobs import Job, jobs, records, request_of
from opensora.inference.manifest import Finished, content_hash, finished, write_samples
from opensora.inference.output import replace_file, sample_file_name, to_uint8
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import files_of, load_items, split_settings
from opensora.inference.references import check_files_exist
from opensora.inference.sizes import VideoSize, frames_of, outside_training, stated_size, video_size
from opensora.registry import SCHEDULERS, build_module
from opensora.schedulers.sampling import SamplingStep
from opensora.utils.errors import UserError
from tools.demo.form import FormValues, prompt_of_item, steps_and_guidance, with_steps_and_guidance
from tools.demo.offer import Offer, cut_prompts, examples_of, items_of, offer_of

logger = logging.getLogger(__name__)

PREVIEWS = 8  # of one sampling run
LARGEST_SEED = 2**31 - 1
WORKER = "sampling"  # the name of the threads
WAITING = 16  # requests next to the one that is sampled; further ones are refused
NEWS_S = 1.0  # between two reports to those who wait
PREPARING = "Preparing the request."
PHASES = {"text": "Encoding the prompt.", "denoising": "Computing the first step.", "decoding": "Decoding the video."}
LONGEST_PROMPT = 5000  # characters, with the settings at its end
FETCH_S, SILENCE_S, LARGEST_REFERENCE = 60.0, 10.0, 100 << 20  # for all references of a prompt; for one; bytes


class Update(NamedTuple):
    """What the page gets whenever something changes; the last one has the sample."""

    status: str  # what is being done, and for how long yet
    done: float | None = None  # share of the steps
    preview: np.ndarray | None = None  # [H, W, 3] uint8
    notes: tuple[str, ...] = ()  # what the visitor should know of this request, once it is known
    sample: Finished | None = None


class Model:
    """One that the page offers: the operator's command for it, and what is known of it since it was loaded."""

    def __init__(self, cfg: InferenceConfig, image: str | None, examples: str | None) -> None:
        items = items_of(cfg)  # before minutes of loading
        # without prompts the config's own settings; scores come with a text
        plain = dataclasses.replace(cfg, prompt=[""], aes=None, flow=None, camera_motion=None)
        self.cfg, self.image, self.first = cfg, image, (items or load_items(plain))[0]
        check_files_exist(dataclasses.replace(cfg, image=None), [self.first])
        self.examples = examples_of(cfg, items, examples)
        self.references = {  # that visitors may name
            source
            for prompt in self.examples
            for source in split_settings(prompt, "prompt")[1].get("reference_path", ())
        } | {*self.first.references}
        self.size: VideoSize
        self.device: torch.device
        self.offer: Offer


class Cancelled(Exception):
    """The user ended the sampling."""


class Studio:
    """Some models, one of them in memory, and a folder for what they make.

    Args:
        cfgs: the settings of each model by its name; the form replaces what it holds. All are loaded once, the first stays.
        folder: for the samples and their sidecars; earlier ones in it are shown too.
        examples: a file of example prompts; None: the models' own.

    Raises:
        UserError: the prompts cannot be read, a file that they start from is not there, or a pipeline cannot be built.
    """

    def __init__(self, cfgs: Mapping[str, InferenceConfig], folder: Path, examples: str | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._kept, self._keeping = folder / "references", threading.Lock()
        self.models: dict[str, Model] = {}
        for name, cfg in cfgs.items():
            image = None if cfg.image is None else self.keep_image(cfg.image, cfg.reference_cache)
            self.models[name] = Model(cfg, image, examples)
        self.default = next(iter(self.models))
        self.pipeline: Any = None
        for number, name in enumerate(reversed(self.models), 1):
            logger.info("loading model %d of %d: %s", number, len(self.models), name)
            self._load(name)
        self._turns = threading.Condition()  # guards the two lists
        self._requests: list[_Request] = []
        self._line: list[_Request] = []  # those that are ready; the first one has the pipeline

    def first_form(self, name: str | None = None) -> FormValues:
        """What the form holds at first: the config's own settings, and those of its first prompt, or else an example."""
        model = self.models[name or self.default]
        steps, guidance = steps_and_guidance(model.cfg.scheduler)
        own = model.first.overrides
        return FormValues(
            prompt_of_item(model.first) or next(iter(model.examples), ""),
            model.first.negative_prompt or "",
            model.image,
            *model.size.image_size,
            model.size.num_frames,
            steps,
            own.get("cfg_scale", guidance),
            own.get("seed", model.cfg.seed),
        )

    def model_of(self, record: Mapping[str, Any], name: str) -> str:
        """The name of the model that made a sample; `name` if that did, or none of these."""

        def parts(config: Mapping[str, Any]) -> str:
            return json.dumps([config.get("model"), config.get("lora")], sort_keys=True)

        made = [other for other, model in self.models.items() if parts(to_dict(model.cfg)) == parts(record["config"])]
        return name if name in made or not made else made[0]

    def size_note(self, name: str | None, num_frames: float, height: float, width: float) -> str:
        """What to say of a size next to the form; "" where it is as in training."""
        if None in (num_frames, height, width):
            return ""
        model, asked = self.models[name or self.default], (int(num_frames), int(height), int(width))
        if model.offer.trained:
            return outside_training(asked, model.offer.trained) or ""
        own = (model.size.num_frames, *model.size.image_size)
        return "" if asked == own else f"This model is set up for {frames_of(own)}; another size may give worse videos."

    def samples(self) -> list[Finished]:
        """All samples of the folder, the newest first."""
        return sorted(finished(self.folder), key=lambda sample: sample.path.stat().st_mtime_ns, reverse=True)

    def cancel(self, owner: str) -> None:
        """End what this owner has running or waiting; nothing happens if there is nothing."""
        with self._turns:
            for request in self._requests:
                if request.owner == owner:
                    request.end()
            self._turns.notify_all()

    def make(self, form: FormValues, owner: str = "", name: str | None = None) -> Iterator[Update]:
        """Sample with the model of that name (None: the first); the last of the updates holds the sample.

        Ending the iteration early ends the sampling after its present step; so does `cancel(owner)`, which ends the iteration at once.

        Raises:
            UserError: the form asks for what cannot be made, the message names what to change; or too many requests wait.
            Cancelled: by `cancel`.
        """
        model = self.models.get(name or self.default)
        if model is None:
            raise UserError(f"there is no model {name!r} here; choose one of {', '.join(self.models)}.")
        request = _Request(owner)
        with self._turns:
            if len(self._requests) > WAITING:
                raise UserError(f"{WAITING} requests are waiting already: try again in a few minutes.")
            self._requests.append(request)
        threading.Thread(
            target=self._work, args=(form, name or self.default, request), name=WORKER, daemon=True
        ).start()
        try:
            while True:
                update = request.news.get()
                if isinstance(update, Exception):
                    raise update
                yield update
                if update.sample is not None:
                    return
        finally:  # without waiting for the thread: the page's server stands still meanwhile
            with self._turns:
                request.end()
                self._turns.notify_all()

    def settings(self, form: FormValues, name: str | None = None) -> InferenceConfig:
        """The config of a form for a model, checked; fetches references.

        Raises:
            UserError: something of it is missing, wrong, or not for visitors.
        """
        model = self.models[name or self.default]
        for field in ("prompt", "negative_prompt"):
            if (length := len(getattr(form, field))) > LONGEST_PROMPT:
                raise UserError(
                    f"The {field.replace('_', ' ')} has {length} characters; at most {LONGEST_PROMPT} are read."
                )
        if not split_settings(form.prompt, "prompt")[0].strip():
            raise UserError("The prompt is empty: say what the video should show.")
        numbers = {field: _whole(getattr(form, field), field) for field in ("height", "width", "num_frames", "steps")}
        seed = random.SystemRandom().randint(0, LARGEST_SEED) if form.seed is None else _whole(form.seed, "seed")
        if form.guidance is None:
            raise UserError("guidance is missing; 1 switches it off.")
        # an empty field means the text "", where the config has it, or the model's own "no text"
        blank = [""] if model.first.negative_prompt == "" else None
        values = {
            **to_dict(model.cfg),
            "prompt": [self._with_own_references(form.prompt, model)],
            "prompt_path": None,
            "start_index": None,
            "end_index": None,
            "negative_prompt": [form.negative_prompt] if form.negative_prompt.strip() else blank,
            "reference_path": None,  # they stand in the prompt
            "mask_strategy": None,
            "image": None if form.image is None else self.keep_image(form.image),
            "image_size": (numbers["height"], numbers["width"]),
            "num_frames": numbers["num_frames"],
            "resolution": None,
            "aspect_ratio": None,
            "aspect_ratio_order": "height:width",
            "duration": None,
            "seed": seed,
            "scheduler": with_steps_and_guidance(model.cfg.scheduler, numbers["steps"], float(form.guidance)),
            "save_format": "mp4" if numbers["num_frames"] == 1 else model.cfg.save_format,  # an image is a PNG
            "save_dir": str(self.folder),
        }
        return config_from_dict(InferenceConfig, values, COMPONENTS)

    def _load(self, name: str) -> None:
        """Put this model in the place of the one that is in memory."""
        self.pipeline = self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        model = self.models[name]
        self.pipeline, self._loaded = VideoPipeline.from_config(model.cfg), name
        model.size, model.device = self.pipeline.defaults, self.pipeline.device
        model.offer = offer_of(model.cfg, self.pipeline)

    def _work(self, form: FormValues, name: str, request: "_Request") -> None:
        """The thread's work; whatever goes wrong is handed over too."""
        try:
            cfg = self.settings(form, name)
            (job,) = jobs(cfg)
            with self._turns:
                self._line.append(request)
                while self._line[0] is not request and not request.ended:
                    ahead = self._line.index(request)
                    request.news.put(
                        Update(f"Waiting: {ahead} before you. Now being made: {self._line[0].last.status}")
                    )
                    self._turns.wait(NEWS_S)
            request.check()
            begin = time.perf_counter()
            if self._loaded != name:
                request.report(f"Loading {name}.")
                self._load(name)
            sample = self._sample(cfg, job, request)
            seconds = time.perf_counter() - begin
            request.report(f"Done in {seconds:.1f} s: {sample.path.name}", done=1.0, sample=sample)
        except Exception as error:  # noqa: BLE001  (raised again where the page waits)
            request.news.put(error)
        finally:
            with self._turns:
                self._requests.remove(request)
                if request in self._line:
                    self._line.remove(request)
                self._turns.notify_all()

    def _sample(self, cfg: InferenceConfig, job: Job, request: "_Request") -> Finished:
        """Sample and write."""
        pipeline = self.pipeline
        pipeline.scheduler = build_module(cfg.scheduler, SCHEDULERS)
        size = video_size(cfg, pipeline.vae, pipeline.model.patch_size)
        asked, legal = ((each.num_frames, *each.image_size) for each in (stated_size(cfg) or size, size))
        moved = [] if asked == legal else [f"The VAE makes no {frames_of(asked)}: these are {frames_of(legal)}."]
        note = self.size_note(self._loaded, *legal)
        request.vae = pipeline.vae
        request.notes = (*cut_prompts(pipeline.text_encoder, job.item), *moved, *([note] if note else []))
        name = sample_file_name(job.item.text, time.time_ns(), prompt_as_path=True)  # which no earlier sample has
        job = job._replace(path=self.folder / name)
        made = pipeline.sample(request_of(cfg, [job], pipeline, size), on_step=request.step, on_phase=request.phase)
        assert made.video is not None, "decoding is asked for"
        request.check()
        (record,) = records(cfg, [job], size)
        (file,) = write_samples(
            [made.video[0]], [job.path], [record], device=pipeline.device, save_format=cfg.save_format
        )
        return Finished(file, record)

    def _with_own_references(self, prompt: str, model: Model) -> str:
        """A prompt whose references are uploads, what the operator's prompts and the folder's samples begin with, or kept from the web."""
        text, settings = split_settings(prompt, "prompt")
        sources: tuple[str, ...] = settings.get("reference_path", ())
        if not sources:
            return prompt
        named = {*model.references}
        for sample in self.samples():
            named.update(*(files_of(files) or () for files in sample.record["config"].get("reference_path") or ()))

        end = time.monotonic() + FETCH_S

        def kept(source: str) -> str:
            if not is_url(source) and (source in named or Path(source).resolve().parent == self._kept.resolve()):
                return source
            limits: Any = {"total_s": end - time.monotonic(), "timeout_s": SILENCE_S, "max_bytes": LARGEST_REFERENCE}
            return self._keep(fetch(source, Path(model.cfg.reference_cache), public_only=source not in named, **limits))

        return text + json.dumps({**settings, "reference_path": [*map(kept, sources)]}, ensure_ascii=False)

    def keep_image(self, source: str, cache: str | None = None) -> str:
        """A copy of a first frame, under a name from its bytes: a sidecar names it, and uploads do not last.

        Args:
            source: a file or a URL; of a video it is the first frame.
            cache: folder for what is fetched; None: that of the first model's config.

        Raises:
            UserError: it cannot be had or read.
        """
        file = fetch(source, Path(cache or self.models[self.default].cfg.reference_cache))
        if not file.is_file():
            raise UserError(f"first frame: there is no file {source}.")
        if is_image(file):
            return self._keep(file)
        with open_clip(file) as clip:
            frame = Image.fromarray(read_indices(file, clip, [0])[0].numpy())
        return self._keep(file, ".png", frame.save)

    def _keep(self, file: Path, suffix: str | None = None, write: Callable[[Path], object] | None = None) -> str:
        """A copy of a file, or what `write` makes of it, under a name from its bytes."""
        kept = self._kept / f"{content_hash(file)}{suffix or file.suffix.lower()}"
        with self._keeping:  # two visitors may have the same file
            if not kept.exists():
                replace_file(kept, write or functools.partial(shutil.copyfile, file))
        return str(kept)


class _Request:
    """What one visitor waits for. The pipeline calls `phase` and `step`, which report, and end the sampling if it was cancelled."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.vae: Any = None  # for previews
        self.news: queue.Queue[Update | Exception] = queue.Queue()
        self.ended = False
        self.notes: tuple[str, ...] = ()
        self.last = Update(PREPARING)
        self.begin = 0.0  # of the steps

    def report(self, status: str, preview: np.ndarray | None = None, **more: Any) -> None:
        """Tell the visitor."""
        self.last = Update(status, notes=self.notes, **more)
        self.news.put(self.last._replace(preview=preview))

    def phase(self, name: str) -> None:
        """What the pipeline is about to do."""
        self.check()
        self.begin = time.perf_counter()
        self.report(PHASES[name], done=1.0 if name == "decoding" else None)

    def step(self, step: SamplingStep) -> None:
        """A step is done."""
        self.check()
        due = step.index % max(1, step.num_steps // PREVIEWS) == 0
        preview = preview_of(self.vae, step.x_0) if due else None
        done = step.index + 1
        left = (time.perf_counter() - self.begin) / done * (step.num_steps - done)
        time_left = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
        self.report(f"Step {done} of {step.num_steps}, about {time_left} left.", preview, done=done / step.num_steps)

    def end(self) -> None:
        """Nobody waits for it any more."""
        self.ended = True
        self.news.put(Cancelled())

    def check(self) -> None:
        """Raise `Cancelled` if it was ended."""
        if self.ended:
            raise Cancelled


def preview_of(vae: Any, x_0: Tensor) -> np.ndarray:
    """The middle frame of a predicted end `x_0 [1, C, t, h, w]`, decoded alone: [H, W, 3] uint8.

    A VAE that works over time sees it without its neighbours, so it is a little less sharp than the sample will be.
    """
    middle = x_0.shape[2] // 2
    z = x_0[:1, :, middle : middle + 1].to(next(vae.parameters()).device)
    with torch.no_grad():
        video = vae.decode(z, vae.video_frames(1))  # [1, 3, T, H, W]
    return to_uint8(video[0, :, :1].float().nan_to_num())[0]


def _whole(value: float | None, name: str) -> int:
    if value is None or value != int(value):
        raise UserError(f"{name.replace('_', ' ')} must be a whole number, not {value}.")
    return int(value)
