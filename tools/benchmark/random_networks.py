"""Networks of real sizes with random weights, as folders that scorers and captioners read: time does not depend on the weights.

Sizes: CLIP ViT-L/14 (Radford et al. 2021), LAION's head of five layers on it (Schuhmann 2022), LLaVA 1.5 7B (Liu et al. 2023,
arXiv:2310.03744) with its tower of 336 pixels, RAFT large (Teed & Deng 2020); "tiny" is for a CPU. The vocabulary is learnt
from the captions it will read, so a common word is one token, as in CLIP's own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

PAD, START, END, IMAGE = "<pad>", "<start>", "<end>", "<image>"
TOWERS = {  # width, layers and heads of the vision and of the text tower, common width, side of pictures, side of patches
    "tiny": ((32, 2, 2), (16, 2, 2), 16, 32, 8),
    "real": ((1024, 24, 16), (768, 12, 12), 768, 224, 14),
}
HEAD = {"tiny": (8, 1), "real": (1024, 128, 64, 16, 1)}  # widths of the layers
HEAD_NUMBERS = {"tiny": (0, 2), "real": (0, 2, 4, 6, 7)}  # as published: the dropouts between them count
LLAMAS = {"tiny": (32, 64, 2, 2, 512), "real": (4096, 11008, 32, 32, 32064)}  # width, MLP, layers, heads, vocabulary
LLAVA_PICTURE = {"tiny": (28, 14), "real": (336, 14)}  # side of pictures, side of patches


def tokenizer_of(captions: Sequence[str], *, ends: bool, most: int = 480) -> Any:
    """A byte-level BPE tokenizer of transformers that was learnt from the captions.

    Args:
        captions: texts.
        ends: whether START and END are put around a text, as CLIP wants it.
        most: size of the vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=most,
        special_tokens=[PAD, START, END, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(captions, trainer)
    if ends:
        marks = [(mark, bpe.token_to_id(mark)) for mark in (START, END)]
        bpe.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, bos_token=START, eos_token=END, additional_special_tokens=[IMAGE],
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def write_clip(folder: Path, size: str, captions: Sequence[str], device: str) -> None:
    """A CLIP with its tokenizer, in float32 as it is published."""
    from transformers import CLIPModel

    tokenizer = tokenizer_of(captions, ends=True, most=480 if size == "tiny" else 8192)
    torch.manual_seed(0)
    with torch.device(device):
        model = CLIPModel(clip_config(size, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def clip_config(size: str, tokenizer: Any) -> Any:
    """Its sizes, and which tokens begin, end and fill a text."""
    from transformers import CLIPConfig

    vision, text, width, side, patch = TOWERS[size]
    return CLIPConfig(
        text_config={
            **_tower(*text), "vocab_size": 480 if size == "tiny" else 49408, "max_position_embeddings": 77,
            "projection_dim": width, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={**_tower(*vision), "image_size": side, "patch_size": patch, "projection_dim": width},
        projection_dim=width,
    )  # fmt: skip


def write_head(file: Path, size: str) -> None:
    """LAION's linear layers under their published names."""
    torch.manual_seed(0)
    widths = (TOWERS[size][2], *HEAD[size])
    state = {}
    for number, before, behind in zip(HEAD_NUMBERS[size], widths, widths[1:], strict=False):
        for name, tensor in nn.Linear(before, behind).state_dict().items():
            state[f"layers.{number}.{name}"] = tensor
    save_file(state, file)


def write_flow(folder: Path, size: str) -> str:
    """RAFT's weights, or for "tiny" one convolution; returns the method as `tools.scoring.flow` names it."""
    torch.manual_seed(0)
    if size == "tiny":
        torch.jit.script(_Shift()).save(str(folder / "flow.pt"))
        return f"torchscript:{folder / 'flow.pt'}"
    from torchvision.models import optical_flow

    torch.save(optical_flow.raft_large(weights=None).state_dict(), folder / "raft.pth")
    return f"raft_large:{folder / 'raft.pth'}"


class _Shift(nn.Module):
    """Two pictures [B, 3, H, W] -> [B, 2, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.conv(torch.cat([first, second], dim=1))
        return moved


def llava(size: str, captions: Sequence[str], device: str, dtype: torch.dtype, new_tokens: int) -> tuple[Any, Any]:
    """Processor and model, made on the device: gigabytes are not written to be read again.

    Every answer has `new_tokens` tokens.
    """
    from transformers import (
        AutoModelForImageTextToText,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaProcessor,
    )

    (side, patch), (width, mlp, layers, heads, vocabulary) = LLAVA_PICTURE[size], LLAMAS[size]
    tokenizer = tokenizer_of(captions, ends=False, most=480 if size == "tiny" else 8192)
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer, patch_size=patch, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=vocabulary,
        max_position_embeddings=4096, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    vision = CLIPVisionConfig(**_tower(*TOWERS[size][0]), image_size=side, patch_size=patch)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE)
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.min_new_tokens = new_tokens
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = text.eos_token_id, text.pad_token_id
    return processor, model.requires_grad_(False).eval()


def _tower(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
