"""A vision-language model of transformers that runs here: LLaVA, Qwen-VL, and whatever `AutoModelForImageTextToText` knows."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.utils.errors import UserError
from tools.caption.options import CaptionOptions, Failure, Frames

logger = logging.getLogger("opensora.tools.caption")
RETRY_TEMPERATURE = 0.7  # the same question gives the same answer otherwise
DTYPES = ("auto", "float32", "bfloat16", "float16")


class VisionLanguageModel:
    """Answers questions about frames."""

    def __init__(self, settings: CaptionOptions, processor: Any, model: Any) -> None:
        self.settings, self.processor, self.model = settings, processor, model
        tokenizer = processor.tokenizer
        tokenizer.padding_side = "left"  # answers begin at the same index
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    @classmethod
    def load(cls, settings: CaptionOptions) -> "VisionLanguageModel":
        """The model of `settings.model`.

        Raises:
            UserError: it cannot be loaded, or the dtype is unknown.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        if settings.dtype not in DTYPES:
            raise UserError(f"--dtype {settings.dtype}: one of {', '.join(DTYPES)}.")
        folder = resolve_pretrained(settings.model, what="vision-language model", any_of=[("config.json",)])
        logger.info("loading %s", settings.model)
        try:
            processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            kind: Any = AutoModelForImageTextToText
            model: Any = kind.from_pretrained(folder, dtype=settings.dtype, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise hub_error(settings.model, "vision-language model", error) from error
        return cls(settings, processor, model.requires_grad_(False).eval().to(settings.device))

    def __call__(self, clips: Sequence[Frames], prompts: Sequence[str], attempt: int) -> list[str | Failure]:
        """Captions; a batch that does not fit into the GPU's memory is halved."""
        try:
            return list(self._answers(clips, prompts, attempt))
        except torch.cuda.OutOfMemoryError as error:
            if len(clips) == 1:
                raise UserError(
                    f"{self.settings.model}: one clip does not fit into the GPU's memory; lower --frames, --long-side or "
                    "--max-tokens, or pass --dtype bfloat16."
                ) from error
        torch.cuda.empty_cache()
        half = len(clips) // 2
        parts = ((clips[:half], prompts[:half]), (clips[half:], prompts[half:]))
        return [caption for part in parts for caption in self(*part, attempt)]

    @torch.no_grad()
    def _answers(self, clips: Sequence[Frames], prompts: Sequence[str], attempt: int) -> list[str]:
        inputs = self.inputs(clips, prompts)
        inputs = inputs.to(self.settings.device, self.model.dtype)  # of floating-point inputs only
        sampling = {"do_sample": True, "temperature": RETRY_TEMPERATURE} if attempt else {"do_sample": False}
        with torch.random.fork_rng():
            torch.manual_seed(attempt)  # the same captions for any number of processes
            tokens = self.model.generate(**inputs, max_new_tokens=self.settings.max_tokens, **sampling)
        answers: list[str] = self.processor.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers

    def inputs(self, clips: Sequence[Frames], prompts: Sequence[str]) -> Any:
        """What the network takes, on the CPU: tokens `input_ids` [B, N], padded in front, and pixels."""
        questions = [self._question(prompt, len(frames)) for prompt, frames in zip(prompts, clips, strict=True)]
        images = [[Image.fromarray(frame) for frame in frames] for frames in clips]
        return self.processor(images=images, text=questions, padding=True, return_tensors="pt")

    def _question(self, prompt: str, images: int) -> str:
        """The prompt as the model wants it: by its chat template; without one, as LLaVA 1.5 was trained."""
        if getattr(self.processor, "chat_template", None):
            content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
            question: str = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
            return question
        return f"USER: {'<image> ' * images}{prompt} ASSISTANT:"
