"""A captioner is a scorer (`tools.scoring.registry`) whose column is a text: so it goes through the same parts and merging."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opensora.utils.errors import UserError
from tools.caption.options import CaptionOptions, Failure, Frames
from tools.caption.prompts import columns_in, filled, prompt_of
from tools.datasets.datautil.captions import with_scores
from tools.datasets.stream import number_of
from tools.scoring.frames import Row, each_file, key_frames, opencv

Describe = Callable[[Sequence[Frames], Sequence[str], int], list["str | Failure"]]
"""From the frames and the prompt of each clip, and the number of the attempt, to captions."""

SCORES = ("aes", "flow", "cmotion")
EMPTY = "the model gave an empty caption"


@dataclass(frozen=True)
class Captioner(CaptionOptions):
    """Writes captions."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The caption's column."""
        return (self.column,)

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the prompt or the suffix reads."""
        return tuple(dict.fromkeys([*columns_in(prompt_of(self.prompt)), *self.scores]))

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """A caption for each file; the reason where there is none.

        Raises:
            UserError: the model cannot be loaded, or the endpoint is away or refuses all requests.
        """
        points = np.linspace(0, 1, self.frames).tolist() if self.frames > 1 else [0.5]
        clips: list[Frames] = []

        def read(path: Path) -> Row:
            clips.append([self._shrunk(frame) for frame in _different(key_frames(path, points))])
            return {self.column: None}

        rows = each_file(paths, self.columns, read)
        there = [i for i, row in enumerate(rows) if "error" not in row]
        prompts = [filled(prompt_of(self.prompt), needed, i) for i in there]
        for i, caption in zip(there, self._captions(clips, prompts), strict=True):
            if isinstance(caption, Failure):
                rows[i]["error"] = str(caption)
            else:
                rows[i][self.column] = suffixed(caption, {name: needed[name][i] for name in self.scores})
        return rows

    def _captions(self, clips: Sequence[Frames], prompts: Sequence[str]) -> list["str | Failure"]:
        """The captions; empty ones are asked for again."""
        describe = describer(self)
        captions: list[str | Failure] = [Failure(EMPTY)] * len(clips)
        for attempt in range(self.retries + 1):
            open_ = [i for i, caption in enumerate(captions) if type(caption) is Failure]
            if not open_:
                break
            answers = describe([clips[i] for i in open_], [prompts[i] for i in open_], attempt)
            for i, answer in zip(open_, answers, strict=True):
                captions[i] = answer if isinstance(answer, Failure) else _plain(answer) or Failure(EMPTY)
        return captions

    def _shrunk(self, frame: np.ndarray) -> np.ndarray:
        height, width = frame.shape[:2]
        scale = self.long_side / max(height, width)
        if scale >= 1:
            return frame
        size = max(1, round(width * scale)), max(1, round(height * scale))
        small: np.ndarray = opencv().resize(frame, size, interpolation=opencv().INTER_AREA)
        return small


@functools.cache
def describer(captioner: Captioner) -> Describe:
    """What answers, loaded once."""
    if captioner.endpoint:
        from tools.caption.endpoint import Endpoint

        return Endpoint(captioner)
    from tools.caption.vision_language import VisionLanguageModel

    return VisionLanguageModel.load(captioner)


def suffixed(caption: str, scores: Mapping[str, Any]) -> str:
    """The caption with its scores behind it, in the words in which prompts for sampling have them; unknown ones are left out.

    Raises:
        UserError: a score is not a number.
    """
    known: dict[str, float | None] = {}
    for name in ("aes", "flow"):
        value = number_of(name, scores.get(name))
        if isinstance(value, str):
            raise UserError(f"column {name}: {value!r} is not a number.")
        known[name] = None if value is None or math.isnan(value) else float(value)
    return with_scores(caption, known["aes"], known["flow"], str(scores.get("cmotion") or ""))


def _plain(answer: str) -> str:
    """One line of text. Half of a character, where --max-tokens cut an emoji in two, is no text that a table can hold."""
    whole = answer.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(whole.split())


def _different(frames: Frames) -> Frames:
    """Without repetitions: an image is one frame, however many are asked for."""
    return [frame for i, frame in enumerate(frames) if i == 0 or frame is not frames[i - 1]]
