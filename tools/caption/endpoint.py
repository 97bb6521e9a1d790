"""A model behind an OpenAI-compatible server (`/chat/completions`): vLLM, SGLang, llama.cpp, OpenAI and others.

Which errors are of a clip and which of the server: docs/how-to/scoring.md. What is of the server must not be held against the clips,
or a server that is away for a minute leaves a table without captions that counts as done.
"""

import base64
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from opensora.utils.errors import UserError
from tools.caption.options import CaptionOptions, Failure, Frames, Refused, Unanswered

WRONG_SETTINGS = (401, 403, 404, 405)  # as 300 to 399: a wrong key, name or address, so no request would be answered
PASSING = (
    402,
    408,
    409,
    429,
)  # no credit, too slow, too many: as 500 and above, the server's state and not the request
JPEG_QUALITY = 90
SHOWN_CHARACTERS = 300  # of a server's error


class Endpoint:
    """Sends one request for each clip, those of a batch at the same time; the client repeats those that were not answered."""

    def __init__(self, settings: CaptionOptions) -> None:
        if not settings.endpoint.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {settings.endpoint}: expected a URL such as http://localhost:8000/v1.")
        if find_spec("openai") is None:
            raise UserError("--endpoint needs the package openai: pip install -e '.[captions]'")
        from openai import OpenAI

        self.settings = settings
        self.client = OpenAI(
            base_url=settings.endpoint,
            api_key=os.environ.get(settings.key_env) or "none",  # a local server asks for none
            timeout=settings.timeout_s,
            max_retries=settings.retries,
        )

    def __call__(self, clips: Sequence[Frames], prompts: Sequence[str], attempt: int) -> list[str | Failure]:
        """Captions, or why there is none.

        Raises:
            UserError: the address, the key or the model's name is wrong, or the server does not answer.
        """
        if not clips:
            return []
        answers = self._answers(clips, prompts)
        lost = [i for i, answer in enumerate(answers) if isinstance(answer, Unanswered)]
        if lost:
            self._require_life(answers[lost[0]])
            again = self._answers([clips[i] for i in lost], [prompts[i] for i in lost])  # it may just have come back
            for i, answer in zip(lost, again, strict=True):
                answers[i] = answer
        return answers

    def _answers(self, clips: Sequence[Frames], prompts: Sequence[str]) -> list[str | Failure]:
        with ThreadPoolExecutor(len(clips)) as pool:
            return list(pool.map(self._answer, clips, prompts))

    def _require_life(self, reason: str) -> None:
        """Ask about a plain image, which harms no server: a clip on which one fails must not end each run at its row."""
        if isinstance(self._answer([np.full((64, 64, 3), 128, np.uint8)], "Describe this picture."), Unanswered):
            raise UserError(
                f"{reason}, and so for a plain image after {self.settings.retries} retries: the server is away or broken. "
                "No clip is blamed; when it is back, the same command resumes."
            )

    def _answer(self, frames: Frames, prompt: str) -> str | Failure:
        from openai import APIConnectionError, APIStatusError, OpenAIError

        images = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        messages: Any = [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
        try:
            answer = self.client.chat.completions.create(
                model=self.settings.model, messages=messages, max_tokens=self.settings.max_tokens
            )
            return str(answer.choices[0].message.content or "")
        except APIStatusError as error:
            code = f"{error.status_code} {error.response.reason_phrase}"
            message = " ".join(error.response.text.split())[:SHOWN_CHARACTERS]
            if error.status_code < 400 or error.status_code in WRONG_SETTINGS:
                raise UserError(
                    f"{self.settings.endpoint} refused a request ({code}: {message}); is the model's name right, and the key in "
                    f"{self.settings.key_env}?"
                ) from None
            kind = Unanswered if error.status_code >= 500 or error.status_code in PASSING else Refused
            return kind(f"{self.settings.endpoint}: {code}{': ' if message else ''}{message}")
        except APIConnectionError as error:
            return Unanswered(f"{self.settings.endpoint}: {error.__cause__ or error}")
        except (OpenAIError, ValueError, LookupError, TypeError, AttributeError) as error:
            return Unanswered(
                f"{self.settings.endpoint}: its answer is no chat completion ({type(error).__name__}: {error})"
            )


def _data_url(frame: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
