"""Frozen text encoders of Hugging Face's `transformers`: any of them, and CLIP's text tower.

An encoder cleans captions, by the rules that its `clean` names, and nothing else does: what `encode` is given is the caption
as it was written.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.utils import cached_file

from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.models.text_encoder.cleaning import Clean, cleaner
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS, inherit_signature
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
VOCABULARY = ("tokenizer.json", "spiece.model", "vocab.json", "vocab.txt", "tokenizer.model", "sentencepiece.bpe.model")
Padding = Literal["max_length", "longest"]
BetweenUses = Literal["keep", "cpu", "unload"]
LENGTH_STEP = 8  # "longest" is rounded up to a multiple: tensor cores like it, and compiled programs see fewer lengths
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # how much of a weight file is hashed


@MODELS.register_module("hf")
class HFTextEncoder(nn.Module):
    """Any encoder that `transformers.AutoModel` loads, for example a small sentence encoder on a laptop.

    The last hidden state of every token: y [B, 1, L, D], mask [B, L].

    Args:
        from_pretrained: Folder with encoder and tokenizer, `package:PACKAGE/folder` = a folder inside an installed
            package, or hub id.
        model_max_length: Captions are padded and cut to so many tokens.
        dtype: Of the weights and the computation.
        cache_dir, local_files_only: Where the hub's files are kept, and whether not to ask the hub.
        clean: What is done to captions: "none", "basic" or "legacy", see docs/reference/text-encoders.md.
        padding: "max_length": the transformer sees padding up to model_max_length; "longest": only up to the longest caption of
            a batch, and y is zero behind it. Real tokens differ by rounding at most.
        between_uses: Where the weights are when nothing is encoded: "keep" on the device; on the "cpu"; or "unload", which
            frees them and reads them again for the next call.
        tokenizer: Folder or hub id of the tokenizer, where it is not with the weights, as in NOVA's pipelines.
        subfolder: The part with the weights of one of diffusers' pipelines, such as "text_encoder"; its tokenizer is in
            "tokenizer".
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherit_signature(cls)

    def __init__(
        self,
        from_pretrained: str,
        model_max_length: int = 120,
        dtype: str | torch.dtype = "fp32",
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        clean: Clean = "none",
        padding: Padding = "max_length",
        between_uses: BetweenUses = "keep",
        tokenizer: str | None = None,
        subfolder: str | None = None,
    ) -> None:
        super().__init__()
        self.from_pretrained = from_pretrained
        self.clean_name, self.clean = clean, cleaner(clean)
        for name, value, known in (("padding", padding, Padding), ("between_uses", between_uses, BetweenUses)):
            if value not in get_args(known):
                raise self._error(f"{name}={value!r} is not one of {', '.join(get_args(known))}.")
        self.padding, self.between_uses = padding, between_uses
        self.dtype = to_torch_dtype(dtype)
        self.sharded = False
        self._warned_of_a_cut = False
        self._device = torch.device("cpu")
        hub = {"cache_dir": cache_dir, "local_files_only": local_files_only, "trust_remote_code": False}
        self._part = subfolder or ""
        self._tokenizer_part = self._part.replace("text_encoder", "tokenizer") if tokenizer is None else ""
        self._hub = {**hub, "subfolder": self._part}
        self._tokenizer_hub = {**hub, "subfolder": self._tokenizer_part}
        needed = [("config.json",), WEIGHTS]
        self._name = resolve_pretrained(from_pretrained, what="text encoder", subfolder=subfolder, any_of=needed)
        self._tokenizer_name = resolve_pretrained(
            tokenizer or from_pretrained,
            what="text encoder" if tokenizer is None else "tokenizer",
            subfolder=self._tokenizer_part,
            any_of=[VOCABULARY],
        )
        try:
            self.tokenizer: Any = self._load_tokenizer()
        except (OSError, ValueError) as error:
            raise hub_error(from_pretrained, "text encoder", error) from error
        self.model: Any = self._load()
        self.config: Any = self.model.config
        self.output_dim: int = self.config.hidden_size
        self.model_max_length = model_max_length
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit is not None:  # RoBERTa and its kin count positions from behind that of padding
            tables = [table for name, table in self.model.named_modules() if name.endswith("position_embeddings")]
            paddings = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
            limit -= max(paddings, default=-1) + 1
        if model_max_length < 1 or (limit is not None and model_max_length > limit):
            raise self._error(f"model_max_length={model_max_length} is not in 1..{limit or ''}.")
        if self.tokenizer.pad_token is None:
            raise self._error("its tokenizer has no padding token; pick an encoder that has one.")
        if padding == "longest" and self.tokenizer.padding_side != "right":
            raise self._error("its tokenizer pads on the left; use padding='max_length'.")

    def train(self, mode: bool = True) -> "HFTextEncoder":  # noqa: FBT001, FBT002  (nn.Module's signature)
        """Stays in eval mode: it is frozen, and dropout would change the text."""
        return super().train(False)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D] fp32, mask [B, L] bool, on the encoder's device; a UserError where fp16 overflowed."""
        texts = [self.clean(text) for text in texts]
        tokens = self._tokenize(texts)
        with self._ready():
            y, mask = self.condition({name: tensor.to(self.device) for name, tensor in tokens.items()})
        if self.dtype == torch.float16 and not y.isfinite().all():
            raise self._error("its features are not finite in fp16; set text_encoder.dtype to bf16 or fp32.")
        return TextCondition(y, mask)

    def condition(self, tokens: dict[str, Tensor]) -> TextCondition:
        """Tokens (each [B, l] int64) -> the text; this default gives the last hidden state of every token."""
        hidden = self.model(**tokens).last_hidden_state  # [B, l, D]
        behind = self.model_max_length - hidden.shape[1]
        y = F.pad(hidden.float(), (0, 0, 0, behind))[:, None]  # [B, 1, L, D]
        return TextCondition(y, F.pad(tokens["attention_mask"].bool(), (0, behind)))

    def cut(self, text: str) -> tuple[int, str]:
        """The number of tokens of a cleaned caption, and its end that does not fit in `model_max_length`; "" if all does."""
        most = self.model_max_length
        ids = self.tokenizer(text, truncation=False, verbose=False)["input_ids"]
        if len(ids) <= most:
            return len(ids), ""
        if not self.tokenizer.is_fast:  # no offsets
            kept = most - self.tokenizer.num_special_tokens_to_add()
            return len(ids), self.tokenizer.decode(ids[kept:], skip_special_tokens=True)
        read = self.tokenizer(text, max_length=most, truncation=True, return_offsets_mapping=True)["offset_mapping"]
        return len(ids), text[max(end for _, end in read) :].strip()

    def unload(self) -> None:
        """Free the weights now; the next `encode` reads them again."""
        if self.sharded:
            raise self._error("sharded weights stay; leave shardformer off to unload.")
        self.model = None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        if self.between_uses == "keep" and self.model is not None:
            return next(self.model.parameters()).device
        return self._device

    def fingerprint(self) -> str:
        """A hash of what features depend on: weight files (64 samples of each), config, tokenizer, length, cleaning, dtype."""
        folder = Path(str(cached_file(self._name, "config.json", **self._hub))).parent
        digest = hashlib.blake2b(digest_size=16)
        settings = (type(self).__name__, self.model_max_length, self.clean_name, str(self.dtype))
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        content = {key: value for key, value in content.items() if key not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps([settings, content], sort_keys=True).encode())
        files = {p for pattern in (*WEIGHTS, *VOCABULARY) for p in folder.glob(pattern)}
        of_tokenizer = Path(self._tokenizer_name)  # a folder; else a hub id, whose files lie where the weights' do
        if self._tokenizer_name == self._name:
            of_tokenizer = folder.parents[len(Path(self._part).parts) - 1] if self._part else folder
        files |= {p for pattern in VOCABULARY for p in (of_tokenizer / self._tokenizer_part).glob(pattern)}
        for path in sorted(files):
            size = path.stat().st_size
            sampled = hashlib.blake2b(str(size).encode(), digest_size=16)
            with path.open("rb") as file:  # samples all over it: files of gigabytes in a moment
                for offset in sorted({max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                    file.seek(offset)
                    sampled.update(file.read(SAMPLE_BYTES))
            digest.update(path.name.encode() + sampled.digest())
        return digest.hexdigest()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HFTextEncoder":  # noqa: FBT001, FBT002
        """What `.to`, `.cuda` and the like do. Weights that are not kept on the device only learn where they will be."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self._device))
        if (
            probe.dtype != self.dtype
        ):  # casting could not bring back what was rounded, and T5 in fp16 keeps layers in fp32
            raise self._error(
                "its dtype is that of the files as they were read; set text_encoder.dtype in place of a cast."
            )
        self._device = probe.device
        return super()._apply(fn, recurse) if self.between_uses == "keep" else self

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """With the weights on the device; afterwards where they belong between uses."""
        if self.model is None:
            self.model = self._load().to(self._device)
        elif self.between_uses != "keep":
            self.model.to(self._device)
        try:
            yield
        finally:
            if self.between_uses == "unload":
                self.unload()
            elif self.between_uses == "cpu":
                self.model.to("cpu")

    def _load_tokenizer(self) -> Any:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self._tokenizer_name, **self._tokenizer_hub)
        if tokenizer.pad_token is None:  # of language models; masked, so that any token does
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def _from_files(self, **options: Any) -> Any:
        return transformers.AutoModel.from_pretrained(self._name, **options)

    def _load(self) -> Any:
        logger.info("loading the text encoder %s", self.from_pretrained)
        try:
            model, info = self._from_files(dtype=self.dtype, output_loading_info=True, **self._hub)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise hub_error(self.from_pretrained, "text encoder", error) from error
        # a pooler is a head that not every checkpoint has, and that no text of ours uses
        if absent := sorted(key for key in info["missing_keys"] if "pooler" not in key):
            raise self._error(f"its files lack {len(absent)} weights, such as {absent[0]}.")
        if model.config.is_encoder_decoder and hasattr(model, "decoder"):
            model = model.get_encoder()
        return model.requires_grad_(False).eval()

    def _tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        most = self.model_max_length
        tokens = self.tokenizer(texts, max_length=most, padding=self.padding, truncation=True, return_tensors="pt")
        length = tokens["input_ids"].shape[1]
        if length == most and not self._warned_of_a_cut:
            for row in tokens["attention_mask"].all(dim=1).nonzero().flatten().tolist():
                count, unread = self.cut(texts[row])
                if count > most:
                    warnings.warn(
                        f"a caption of {count} tokens is cut to model_max_length={most}: {texts[row][:60]!r}..., without "
                        f"{unread[:60]!r} (reported once)",
                        stacklevel=4,  # who calls `encode`, which is decorated
                    )
                    self._warned_of_a_cut = True
                    break
        # of nothing but empty captions some tokenizers make no token, and transformers 4 in floats, and models take at least one
        behind = min(max(-(-length // LENGTH_STEP), 1) * LENGTH_STEP, most) - length
        fill = {"input_ids": self.tokenizer.pad_token_id}
        return {name: F.pad(tensor.long(), (0, behind), value=fill.get(name, 0)) for name, tensor in tokens.items()}

    def _error(self, text: str) -> UserError:
        return UserError(f"text encoder {self.from_pretrained}: {text}")


@MODELS.register_module("clip")
class ClipEncoder(HFTextEncoder):
    """CLIP's text tower (Radford et al. 2021, arXiv:2103.00020): one vector per caption, for DiT and Latte.

    The pooled output, that is the state at the end-of-text token: y [B, 1, 1, D], mask [B, 1].

    The arguments are those of `HFTextEncoder`.
    """

    def __init__(
        self, from_pretrained: str = "openai/clip-vit-base-patch32", model_max_length: int = 77, **options: Any
    ) -> None:
        super().__init__(from_pretrained, model_max_length, **options)

    def _from_files(self, **options: Any) -> Any:
        return transformers.CLIPTextModel.from_pretrained(self._name, **options)

    def condition(self, tokens: dict[str, Tensor]) -> TextCondition:
        """Tokens (each [B, L] int64) -> the pooled text."""
        pooled = self.model(**tokens).pooler_output  # [B, D]
        mask = torch.ones(len(pooled), 1, dtype=torch.bool, device=pooled.device)
        return TextCondition(pooled[:, None, None].float(), mask)
