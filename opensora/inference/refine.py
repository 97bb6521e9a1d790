"""`llm_refine`: a language model behind an OpenAI-compatible server rewrites the prompts.

The environment says which: OPENAI_BASE_URL (else OpenAI's own), OPENAI_API_KEY and OPENAI_MODEL (else gpt-4o). Answers are kept in
`save_dir`, so that all processes, and a run that is repeated, have the same prompts.
"""

import http.client
import json
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from opensora.inference.prompts import PromptItem, Segment, without_scores
from opensora.utils.errors import UserError

INSTRUCTION = (
    "Rewrite the user's text as a prompt for a video model, in English: one paragraph of 40 to 80 words. Keep all that the text says and add "
    "what can be seen: subjects, motion, setting, light, camera, style. Answer with the paragraph alone."
)


def refine_prompts(items: Sequence[PromptItem], folder: Path) -> list[PromptItem]:
    """The prompts with each text rewritten, but for its scores; those that `folder` has an answer for already are not asked again.

    Raises:
        UserError: the server does not answer as it should.
    """
    file = folder / "refined_prompts.json"
    if not dist.is_initialized() or dist.get_rank() == 0:
        answers: dict[str, str] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        folder.mkdir(parents=True, exist_ok=True)
        for text in dict.fromkeys(without_scores(segment.text) for item in items for segment in item.segments):
            answers[text] = answers.get(text) or (_answer(text) if text else "")
            file.write_text(json.dumps(answers, indent=1, ensure_ascii=False), "utf-8")  # each is paid for
    if dist.is_initialized():
        dist.barrier()
    known = json.loads(file.read_text("utf-8"))

    def refined(segment: Segment) -> Segment:
        old = without_scores(segment.text)
        return segment._replace(text=known[old] + segment.text[len(old) :])

    return [replace(item, segments=tuple(map(refined, item.segments))) for item in items]


def _answer(text: str) -> str:
    url = f"{os.environ.get('OPENAI_BASE_URL', 'https://api.openai.com/v1').rstrip('/')}/chat/completions"
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]
    body = {"model": os.environ.get("OPENAI_MODEL", "gpt-4o"), "messages": messages}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120
        ) as response:
            if answer := " ".join(json.load(response)["choices"][0]["message"]["content"].split()):
                return answer
            error: Exception = ValueError("an empty answer")
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as caught:
        error = caught
    raise UserError(
        f"llm_refine: {url} did not rewrite {text[:60]!r} ({error or type(error).__name__}). Check OPENAI_BASE_URL, OPENAI_API_KEY and "
        "OPENAI_MODEL, or leave llm_refine out."
    ) from error
