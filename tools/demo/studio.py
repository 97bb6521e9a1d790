"""What the demo page does, without the page: sample one video, report progress, show previews, keep what was made.

Each request has a thread that reads the form, fetches what it names, waits for its turn, samples, and hands over each step. There
is one pipeline: requests take turns at it, in the order in which they are ready, so that nobody waits for another's download.

Whoever can reach the page is a stranger: prompts name only uploads, public addresses, and what the operator named.
"""

import dataclasses
import functools
import json
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
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
from opensora.inference.prompts import PromptItem, files_of, load_items, split_settings
from opensora.inference.references import check_files_exist
from opensora.inference.sizes import VideoSize, video_size, warn_outside_training
from opensora.registry import SCHEDULERS, build_module
from opensora.schedulers.sampling import SamplingStep
from opensora.utils.errors import UserError
from tools.demo.form import FormValues, prompt_of_item, steps_and_guidance, with_steps_and_guidance

PREVIEWS = 8  # of one sampling run
LARGEST_SEED = 2**31 - 1
WORKER = "sampling"  # the name of the threads
WAITING = 16  # requests next to the one that is sampled; further ones are refused
LONGEST_PROMPT = 5000  # characters, with the settings at its end
FETCH_S, SILENCE_S, LARGEST_REFERENCE = 60.0, 10.0, 100 << 20  # for all references of a prompt; for one; bytes


class Update(NamedTuple):
    """What the page gets after a step, and at the end."""

    step: int
    num_steps: int
    seconds: float  # since the beginning
    preview: np.ndarray | None = None  # [H, W, 3] uint8
    sample: Finished | None = None  # at the end


class Cancelled(Exception):
    """The user ended the sampling."""


class Studio:
    """A pipeline, and a folder for what it makes.

    Args:
        cfg: the settings; the form replaces what it holds.
        folder: for the samples and their sidecars; earlier ones in it are shown too.

    Raises:
        UserError: the prompts cannot be read, a file that they start from is not there, or the pipeline cannot be built.
    """

    def __init__(self, cfg: InferenceConfig, folder: Path) -> None:
        self.cfg, self.folder = cfg, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._kept, self._keeping = folder / "references", threading.Lock()
        self._first = _first_item(cfg)  # before minutes of loading
        self._image = None if cfg.image is None else self.keep_image(cfg.image)
        self.pipeline = VideoPipeline.from_config(cfg)
        self._turns = threading.Condition()  # guards the two lists
        self._requests: list[_Request] = []
        self._line: list[_Request] = []  # those that are ready; the first one has the pipeline

    def first_form(self) -> FormValues:
        """What the form holds at first: the config's own settings, and those of its first prompt."""
        steps, guidance = steps_and_guidance(self.cfg.scheduler)
        size, own = self.pipeline.defaults, self._first.overrides
        return FormValues(
            prompt_of_item(self._first),
            self._first.negative_prompt or "",
            self._image,
            *size.image_size,
            size.num_frames,
            steps,
            own.get("cfg_scale", guidance),
            own.get("seed", self.cfg.seed),
        )

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

    def make(self, form: FormValues, owner: str = "") -> Iterator[Update]:
        """Sample; each step gives an update, and the last one holds the sample.

        Ending the iteration early ends the sampling after its present step; so does `cancel(owner)`, which ends the iteration at once.

        Raises:
            UserError: the form asks for what cannot be made, the message names what to change; or too many requests wait.
            Cancelled: by `cancel`.
        """
        request = _Request(owner, self.pipeline.vae)
        with self._turns:
            if len(self._requests) > WAITING:
                raise UserError(f"{WAITING} requests are waiting already: try again in a few minutes.")
            self._requests.append(request)
        threading.Thread(target=self._work, args=(form, request), name=WORKER, daemon=True).start()
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

    def settings(self, form: FormValues) -> InferenceConfig:
        """The config of a form, checked; fetches references.

        Raises:
            UserError: something of it is missing, wrong, or not for visitors.
        """
        for name in ("prompt", "negative_prompt"):
            if (length := len(getattr(form, name))) > LONGEST_PROMPT:
                raise UserError(
                    f"The {name.replace('_', ' ')} has {length} characters; at most {LONGEST_PROMPT} are read."
                )
        if not split_settings(form.prompt, "prompt")[0].strip():
            raise UserError("The prompt is empty: say what the video should show.")
        numbers = {name: _whole(getattr(form, name), name) for name in ("height", "width", "num_frames", "steps")}
        seed = random.SystemRandom().randint(0, LARGEST_SEED) if form.seed is None else _whole(form.seed, "seed")
        if form.guidance is None:
            raise UserError("guidance is missing; 1 switches it off.")
        # an empty field means the text "", where the config has it, or the model's own "no text"
        blank = [""] if self._first.negative_prompt == "" else None
        values = {
            **to_dict(self.cfg),
            "prompt": [self._with_own_references(form.prompt)],
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
            "scheduler": with_steps_and_guidance(self.cfg.scheduler, numbers["steps"], float(form.guidance)),
            "save_format": "mp4" if numbers["num_frames"] == 1 else self.cfg.save_format,  # an image is a PNG
            "save_dir": str(self.folder),
        }
        return config_from_dict(InferenceConfig, values, COMPONENTS)

    def _work(self, form: FormValues, request: "_Request") -> None:
        """The thread's work; whatever goes wrong is handed over too."""
        try:
            cfg = self.settings(form)
            (job,) = jobs(cfg)
            size = video_size(cfg, self.pipeline.vae, self.pipeline.model.patch_size)
            with self._turns:
                self._line.append(request)
                self._turns.wait_for(lambda: self._line[0] is request or request.ended)
            request.check()
            sample = self._sample(cfg, job, size, request)
            seconds = time.perf_counter() - request.begin
            request.news.put(request.last._replace(seconds=seconds, preview=None, sample=sample))
        except Exception as error:  # noqa: BLE001  (raised again where the page waits)
            request.news.put(error)
        finally:
            with self._turns:
                self._requests.remove(request)
                if request in self._line:
                    self._line.remove(request)
                self._turns.notify_all()

    def _sample(self, cfg: InferenceConfig, job: Job, size: VideoSize, request: "_Request") -> Finished:
        """Sample and write."""
        request.begin = time.perf_counter()
        self.pipeline.scheduler = build_module(cfg.scheduler, SCHEDULERS)
        warn_outside_training(size, cfg.model.get("from_pretrained"))
        name = sample_file_name(job.item.text, time.time_ns(), prompt_as_path=True)  # which no earlier sample has
        job = job._replace(path=self.folder / name)
        made = self.pipeline.sample(request_of(cfg, [job], self.pipeline, size), on_step=request)
        assert made.video is not None, "decoding is asked for"
        request.check()
        (record,) = records(cfg, [job], size)
        (file,) = write_samples(
            [made.video[0]], [job.path], [record], device=self.pipeline.device, save_format=cfg.save_format
        )
        return Finished(file, record)

    def _with_own_references(self, prompt: str) -> str:
        """A prompt whose references are uploads, what the first prompt and the folder's samples begin with, or kept from the web."""
        text, settings = split_settings(prompt, "prompt")
        sources: tuple[str, ...] = settings.get("reference_path", ())
        if not sources:
            return prompt
        named = set(self._first.references)
        for sample in self.samples():
            named.update(*(files_of(files) or () for files in sample.record["config"].get("reference_path") or ()))

        end = time.monotonic() + FETCH_S

        def kept(source: str) -> str:
            if not is_url(source) and (source in named or Path(source).resolve().parent == self._kept.resolve()):
                return source
            limits: Any = {"total_s": end - time.monotonic(), "timeout_s": SILENCE_S, "max_bytes": LARGEST_REFERENCE}
            return self._keep(fetch(source, Path(self.cfg.reference_cache), public_only=source not in named, **limits))

        return text + json.dumps({**settings, "reference_path": [*map(kept, sources)]}, ensure_ascii=False)

    def keep_image(self, source: str) -> str:
        """A copy of a first frame, under a name from its bytes: a sidecar names it, and uploads do not last.

        Args:
            source: a file or a URL; of a video it is the first frame.

        Raises:
            UserError: it cannot be had or read.
        """
        file = fetch(source, Path(self.cfg.reference_cache))
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


def _first_item(cfg: InferenceConfig) -> PromptItem:
    """The first prompt with all that belongs to it; without any, the config's own settings."""
    if cfg.prompt is not None or cfg.prompt_path is not None:
        first = load_items(cfg)[0]
    else:
        plain = dataclasses.replace(
            cfg, prompt=[""], aes=None, flow=None, camera_motion=None
        )  # scores come with a text
        first = load_items(plain)[0]
    check_files_exist(dataclasses.replace(cfg, image=None), [first])
    return first


class _Request:
    """What one visitor waits for. The pipeline calls it after each step: it reports, and ends the sampling when that is wanted."""

    def __init__(self, owner: str, vae: Any) -> None:
        self.owner, self.vae = owner, vae
        self.news: queue.Queue[Update | Exception] = queue.Queue()
        self.ended = False
        self.begin = time.perf_counter()
        self.last = Update(0, 0, 0.0)

    def __call__(self, step: SamplingStep) -> None:
        self.check()
        due = step.index % max(1, step.num_steps // PREVIEWS) == 0
        preview = preview_of(self.vae, step.x_0) if due else None
        self.last = Update(step.index + 1, step.num_steps, time.perf_counter() - self.begin, preview)
        self.news.put(self.last)

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
