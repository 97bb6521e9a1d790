"""The options of a captioner, and the answers that it takes from a model, here or behind an endpoint."""

from dataclasses import dataclass

import numpy as np

Frames = list[np.ndarray]


class Failure(str):
    """Why there is no caption."""


class Refused(Failure):
    """The model's server takes no such request: this one would be refused again."""


class Unanswered(Failure):
    """After all retries. Nothing that is about the clip: the server is away, overloaded or broken."""


@dataclass(frozen=True)
class CaptionOptions:
    """Which model captions clips, and how.

    Attributes:
        model: folder or hub id of a vision-language model; with an endpoint, the name of the model there.
        endpoint: URL of an OpenAI-compatible server, up to and with /v1; empty: the model runs here.
        prompt: a template's name, a .txt file or a text.
        frames: of each clip, evenly spread over it.
        long_side: pixels that frames are shrunk to; never enlarged.
        max_tokens: of a caption.
        retries: further attempts after an empty caption or an error of the network.
        column: the name of what is added.
        scores: of the columns aes, flow and cmotion, those that are put behind the caption, as in prompts for sampling.
        key_env: the environment variable that holds the endpoint's key; the key itself is written nowhere.
        timeout_s: of one request.
        dtype: of the model here: auto, float32, bfloat16 or float16.
        device: of the model here.
    """

    model: str
    endpoint: str = ""
    prompt: str = "video"
    frames: int = 4
    long_side: int = 512
    max_tokens: int = 200
    retries: int = 2
    column: str = "text"
    scores: tuple[str, ...] = ()
    key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0
    dtype: str = "auto"
    device: str = "cpu"
