"""What the demo page does, without the page: sample one video, report progress, show previews, keep what was made.

Sampling runs in a thread that hands over each step, so that the page can show progress and end it between two steps. There
is one pipeline; a second request waits until the first is done.
"""

import dataclasses
import hashlib
import json
import queue
import random
import shutil
import threading
import time
from collections.abc import Iterator
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
from opensora.inference.fetch import fetch
from opensora.inference.jobs import jobs, records, request_of
from opensora.inference.manifest import Finished, finished, write_samples
from opensora.inference.output import sample_file_name, to_uint8
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import PromptItem, load_items, split_settings
from opensora.inference.references import check_files_exist
from opensora.inference.sizes import video_size, warn_outside_training
from opensora.registry import SCHEDULERS, build_module
from opensora.schedulers.sampling import SamplingStep
from opensora.utils.errors import UserError
from tools.demo.form import FormValues, prompt_of_item, steps_and_guidance, with_steps_and_guidance

PREVIEWS = 8  # of one sampling run
LARGEST_SEED = 2**31 - 1
WORKER = "sampling"  # the name of the thread


class Update(NamedTuple):
    """What the page gets after a step, and at the end."""

    step: int
    num_steps: int
    seconds: float  # since the beginning
    preview: np.ndarray | None = None  # [H, W, 3] uint8
    sample: Finished | None = None  # at the end


class Cancelled(Exception):
    """The user ended the sampling."""


News = queue.Queue[Update | Exception]


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
        self._first = _first_item(cfg)  # before minutes of loading
        self._image = None if cfg.image is None else self.keep_image(cfg.image)
        self.pipeline = VideoPipeline.from_config(cfg)
        self._one_at_a_time = threading.Lock()
        self._cancel: dict[str, threading.Event] = {}

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
        if owner in self._cancel:
            self._cancel[owner].set()

    def make(self, form: FormValues, owner: str = "") -> Iterator[Update]:
        """Sample; each step gives an update, and the last one holds the sample.

        Ending the iteration early, or `cancel(owner)`, ends the sampling after its present step.

        Raises:
            UserError: the form asks for what cannot be made; the message names what to change.
            Cancelled: by `cancel`.
        """
        cfg = self.settings(form)
        end = self._cancel[owner] = threading.Event()
        news: News = queue.Queue()
        worker = threading.Thread(target=self._work, args=(cfg, news, end), name=WORKER, daemon=True)
        worker.start()
        try:
            while True:
                update = news.get()
                if isinstance(update, Exception):
                    raise update
                yield update
                if update.sample is not None:
                    return
        finally:
            end.set()
            worker.join()

    def settings(self, form: FormValues) -> InferenceConfig:
        """The config of a form, checked.

        Raises:
            UserError: something of it is missing or wrong.
        """
        if not split_settings(form.prompt, "prompt")[0].strip():
            raise UserError("The prompt is empty: say what the video should show.")
        numbers = {name: _whole(getattr(form, name), name) for name in ("height", "width", "num_frames", "steps")}
        seed = random.SystemRandom().randint(0, LARGEST_SEED) if form.seed is None else _whole(form.seed, "seed")
        if form.guidance is None:
            raise UserError("guidance is missing; 1 switches it off.")
        values = {
            **to_dict(self.cfg),
            "prompt": [form.prompt],
            "prompt_path": None,
            "start_index": None,
            "end_index": None,
            "negative_prompt": [form.negative_prompt] if form.negative_prompt.strip() else self._blank(),
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

    def _blank(self) -> list[str] | None:
        """What an empty field means: the text "", where the config has it, or the model's own "no text"."""
        return [""] if self._first.negative_prompt == "" else None

    def _work(self, cfg: InferenceConfig, news: News, end: threading.Event) -> None:
        """The thread's work; whatever goes wrong is handed over too."""
        try:
            with self._one_at_a_time:
                watch = _Watch(self.pipeline.vae, news, end)
                sample = self._sample(cfg, watch)
                news.put(watch.last._replace(seconds=watch.seconds, preview=None, sample=sample))
        except Exception as error:  # noqa: BLE001  (raised again where the page waits)
            news.put(error)

    def _sample(self, cfg: InferenceConfig, watch: "_Watch") -> Finished:
        """Sample and write."""
        watch.check()  # cancelled while it waited
        self.pipeline.scheduler = build_module(cfg.scheduler, SCHEDULERS)
        size = video_size(cfg, self.pipeline.vae, self.pipeline.model.patch_size)
        warn_outside_training(size, cfg.model.get("from_pretrained"))
        (job,) = jobs(cfg)
        job = job._replace(path=self.folder / _new_name(job.item.text))
        made = self.pipeline.sample(request_of(cfg, [job], self.pipeline, size), on_step=watch)
        assert made.video is not None, "decoding is asked for"
        (record,) = records(cfg, [job], size)
        (file,) = write_samples(
            [made.video[0]], [job.path], [record], device=self.pipeline.device, save_format=cfg.save_format
        )
        return Finished(file, record)

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
        content = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        still = is_image(file)
        kept = self.folder / "references" / f"{content}{file.suffix.lower() if still else '.png'}"
        if kept.exists():
            return str(kept)
        kept.parent.mkdir(exist_ok=True)
        if still:
            shutil.copyfile(file, kept)
        else:
            with open_clip(file) as clip:
                Image.fromarray(read_indices(file, clip, [0])[0].numpy()).save(kept)
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


def _new_name(prompt: str) -> str:
    """A name that no earlier sample of the same prompt has."""
    return sample_file_name(prompt, time.time_ns(), prompt_as_path=True)


class _Watch:
    """What the pipeline calls after each step: reports it, and ends the sampling when the user wants that."""

    def __init__(self, vae: Any, news: News, end: threading.Event) -> None:
        self.vae, self.news, self.end = vae, news, end
        self.begin = time.perf_counter()
        self.last = Update(0, 0, 0.0)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.begin

    def __call__(self, step: SamplingStep) -> None:
        self.check()
        due = step.index % max(1, step.num_steps // PREVIEWS) == 0
        preview = preview_of(self.vae, step.x_0) if due else None
        self.last = Update(step.index + 1, step.num_steps, self.seconds, preview)
        self.news.put(self.last)

    def check(self) -> None:
        """Raise `Cancelled` if that is wanted."""
        if self.end.is_set():
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


def all_settings(record: dict[str, Any]) -> str:
    """A sidecar as text."""
    return json.dumps(record, indent=2, ensure_ascii=False)


def _whole(value: float | None, name: str) -> int:
    if value is None or value != int(value):
        raise UserError(f"{name.replace('_', ' ')} must be a whole number, not {value}.")
    return int(value)
