"""A model behind an OpenAI-compatible server (`/chat/completions`): vLLM, SGLang, llama.cpp, OpenAI and others.

Which errors are of a clip and which of the server: docs/how-to/scoring.md. What is of the server must not be held against the clips,
or a server that is away for a minute leaves a table without captions that counts as done.
"""

import base64
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from opensora.utils.errors import UserError
from tools.caption.options import CaptionOptions, Failure, Frames, Refused, Unanswered

WRONG_SETTINGS = (401, 403, 404, 405)  # as 300 to 399: a wrong key, name or address, so no request would be answered
PASSING = (402, 408, 429)  # no credit, too slow, too many: as 500 and above, the server's state and not the request
LONGEST_WAIT_S = 60.0
JPEG_QUALITY = 90
SHOWN_CHARACTERS = 300  # of a server's error


class Endpoint:
    """Sends one request for each clip, those of a batch at the same time."""

    def __init__(self, settings: CaptionOptions) -> None:
        if not settings.endpoint.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {settings.endpoint}: expected a URL such as http://localhost:8000/v1.")
        self.settings = settings
        self.url = f"{settings.endpoint.rstrip('/')}/chat/completions"

    def __call__(self, clips: Sequence[Frames], prompts: Sequence[str], attempt: int) -> list[str | Failure]:
        """Captions, or why there is none.

        Raises:
            UserError: the address, the key or the model's name is wrong, or at the last attempt the server does not answer.
        """
        if not clips:
            return []
        time.sleep(min(LONGEST_WAIT_S, 2.0**attempt) if attempt else 0)
        answers = self._answers(clips, prompts)
        lost = [i for i, answer in enumerate(answers) if isinstance(answer, Unanswered)]
        if lost and attempt == self.settings.retries:
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
        try:
            with urllib.request.urlopen(self._request(frames, prompt), timeout=self.settings.timeout_s) as response:
                answer = json.load(response)
            return str(answer["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            return self._refusal(error)
        except (OSError, http.client.HTTPException) as error:
            return Unanswered(f"{self.url}: {error or type(error).__name__}")
        except (ValueError, LookupError, TypeError) as error:
            return Unanswered(f"{self.url}: its answer is no chat completion ({type(error).__name__}: {error})")

    def _refusal(self, error: urllib.error.HTTPError) -> Failure:
        code = f"{error.code} {error.reason}"
        message = _message_of(error)
        if error.code < 400 or error.code in WRONG_SETTINGS:
            raise UserError(
                f"{self.url} refused a request ({code}: {message}); is the model's name right, and the key in "
                f"{self.settings.key_env}?"
            ) from None
        kind = Unanswered if error.code >= 500 or error.code in PASSING else Refused
        return kind(f"{self.url}: {code}{': ' if message else ''}{message}")

    def _request(self, frames: Frames, prompt: str) -> urllib.request.Request:
        images = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}],
            "max_tokens": self.settings.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.settings.key_env):
            headers["Authorization"] = f"Bearer {key}"
        return urllib.request.Request(self.url, json.dumps(body).encode(), headers)


def _message_of(error: urllib.error.HTTPError) -> str:
    """The server's message about an error, in one line."""
    try:
        text = error.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    return " ".join(text.split())[:SHOWN_CHARACTERS]


def _data_url(frame: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
