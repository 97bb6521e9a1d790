"""A model behind an OpenAI-compatible server (`/chat/completions`): vLLM, SGLang, llama.cpp, OpenAI and others."""

import base64
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image

from opensora.utils.errors import UserError
from tools.caption.captioner import Captioner, Failure, Frames

REFUSED = (400, 401, 403, 404, 405, 422)  # the same request would be refused again
LONGEST_WAIT_S = 60.0
JPEG_QUALITY = 90


class Endpoint:
    """Sends one request for each clip, those of a batch at the same time."""

    def __init__(self, settings: Captioner) -> None:
        if not settings.endpoint.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {settings.endpoint}: expected a URL such as http://localhost:8000/v1.")
        self.settings = settings
        self.url = f"{settings.endpoint.rstrip('/')}/chat/completions"

    def __call__(self, pictures: Sequence[Frames], prompts: Sequence[str], attempt: int) -> list[str | Failure]:
        """Captions, or why there is none.

        Raises:
            UserError: the server refuses the request: its address, the key or the model's name is wrong.
        """
        if not pictures:
            return []
        time.sleep(min(LONGEST_WAIT_S, 2.0**attempt) if attempt else 0)
        with ThreadPoolExecutor(len(pictures)) as pool:
            return list(pool.map(self._answer, pictures, prompts))

    def _answer(self, frames: Frames, prompt: str) -> str | Failure:
        try:
            with urllib.request.urlopen(self._request(frames, prompt), timeout=self.settings.timeout_s) as response:
                answer = json.load(response)
            return str(answer["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            reason = error.read(500).decode(errors="replace").strip()
            if error.code in REFUSED:
                raise UserError(
                    f"{self.url} refused a request ({error.code} {error.reason}: {reason}); is the model's name right, and "
                    f"the key in {self.settings.key_env}?"
                ) from None
            return Failure(f"{self.url}: {error.code} {error.reason}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            return Failure(f"{self.url}: {error or type(error).__name__}")

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


def _data_url(frame: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
