"""Captions a second of T5's encoder, with random weights and T5's own vocabulary.

    python -m tools.benchmark.text_encoder [--size xxl] [--length 120] [--batch 32] [--seconds 3]
    python -m tools.benchmark.text_encoder --size tiny --batch 4 --seconds 1          on a CPU

The captions are those of assets/clips. Compared: the network as it is, with compiled blocks (`shardformer=True`), and each of
them computing only up to a batch's longest caption (`padding="longest"`). Tokenizing and cleaning are part of the time.
Relative error: of real tokens, against the first row, so in bf16 it says how far one rounding is from another.
"""

import argparse
import csv
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import T5Config, T5EncoderModel

from opensora.models.text_encoder.hf import HFTextEncoder, Padding
from opensora.models.text_encoder.t5 import T5Encoder, compile_blocks_of
from opensora.utils.dtype import DTYPES, to_torch_dtype

ASSETS = Path(__file__).resolve().parents[2] / "assets"
VOCABULARY, CLIPS = ASSETS / "tokenizers" / "t5", ASSETS / "clips" / "clips.csv"
SIZES = {  # d_model, d_ff, layers, heads (of 64 but for tiny) of T5 v1.1
    "tiny": (64, 128, 2, 4),
    "base": (768, 2048, 12, 12),
    "xl": (2048, 5120, 24, 32),
    "xxl": (4096, 10240, 24, 64),
}
WAYS: tuple[tuple[str, bool, Padding], ...] = (("as it is", False, "max_length"), ("compiled", True, "max_length"),
        ("longest", False, "longest"), ("compiled, longest", True, "longest"))  # fmt: skip


class Result(NamedTuple):
    """One row."""

    captions_per_s: float
    first_s: float
    peak_gib: float
    y: Tensor  # [B, 1, L, D] of the first batch
    mask: Tensor


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="xxl")
    parser.add_argument("--length", type=int, default=120, help="model_max_length; 120 and 300 are Open-Sora's")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--seconds", type=float, default=3, help="for each row, after the first call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"T5 {args.size}, {name}, torch {torch.__version__}, {args.dtype}, {args.length} tokens, batch {args.batch}\n"
    )
    print("| | captions/s | first call, s | peak GiB | relative error |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder), args.size, to_torch_dtype(args.dtype))
        encoder = T5Encoder(folder, model_max_length=args.length, dtype=args.dtype).to(args.device)
        first: Result | None = None
        for label, fast, padding in WAYS:  # one encoder, as reading gigabytes takes longer than measuring
            set_way(encoder, fast=fast, padding=padding)
            result = measure(encoder, args.batch, args.seconds)
            first = first or result
            row = f"{result.captions_per_s:.1f} | {result.first_s:.1f} | {result.peak_gib:.2f}"
            print(f"| {label} | {row} | {relative_error(result, first):.2%} |", flush=True)


def set_way(encoder: HFTextEncoder, *, fast: bool, padding: Padding) -> None:
    """Make the encoder what `shardformer` and `padding` in its constructor would make it."""
    encoder.padding = padding
    for block in encoder.model.encoder.block:
        block.__dict__.pop("forward", None)  # a compiled one
    if fast:
        torch._dynamo.reset()
        compile_blocks_of(encoder.model, varying_sizes=padding == "longest")


def write_encoder(folder: Path, size: str, dtype: torch.dtype) -> None:
    """A T5 folder with random weights in `dtype`, scaled so that features stay of order 1."""
    d_model, d_ff, layers, heads = SIZES[size]
    config = T5Config(
        vocab_size=32128, d_model=d_model, d_ff=d_ff, d_kv=64 if size != "tiny" else 16, num_layers=layers,
        num_heads=heads, feed_forward_proj="gated-gelu", is_encoder_decoder=False,
    )  # fmt: skip
    with torch.device("meta"):
        state = T5EncoderModel(config).state_dict()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, like in state.items():
        if name == "encoder.embed_tokens.weight":  # the same as `shared`
            continue
        weight = torch.empty(like.shape, dtype=dtype, device=device)
        if "layer_norm" in name:
            weights[name] = weight.fill_(1).cpu()
        else:
            weights[name] = weight.normal_(std=std_of(name, like, config.d_kv), generator=rng).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["T5EncoderModel"]}))
    for file in VOCABULARY.glob("*[!d]"):  # not its README.md
        shutil.copy(file, folder)


def std_of(name: str, weight: Tensor, d_kv: int) -> float:
    """Of an initial weight, as T5's own are.

    T5 does not divide its attention's scores by sqrt(d_kv): queries are smaller by that. With larger ones attention picks one token,
    and which one depends on a rounding.
    """
    if "shared" in name:
        return 1.0
    return weight.shape[-1] ** -0.5 * (d_kv**-0.5 if name.endswith(".q.weight") else 1.0)


def captions(batch: int) -> Iterator[list[str]]:
    """Batches of the repository's captions, over and over."""
    with CLIPS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [row[column] for column in ("text", "text_2", "text_3", "text_4", "text_5", "text_6") for row in rows]
    endless = itertools.cycle(texts)
    while True:
        yield list(itertools.islice(endless, batch))


def measure(encoder: Any, batch: int, seconds: float) -> Result:
    """The first call, which compiles; another four, which meet other lengths; then as many as fit into the time."""
    on_gpu = encoder.device.type == "cuda"
    finish = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batches = captions(batch)
    start = time.perf_counter()
    y, mask = encoder.encode(next(batches))
    finish()
    first_s = time.perf_counter() - start
    for _ in range(4):
        encoder.encode(next(batches))
    finish()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        encoder.encode(next(batches))
        finish()
        count += batch
    rate = count / (time.perf_counter() - start)
    return Result(rate, first_s, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0, y, mask)


def relative_error(result: Result, exact: Result) -> float:
    """|y - y_exact| / |y_exact| over real tokens."""
    real = exact.mask[:, None, :, None]
    return float(((result.y - exact.y) * real).norm() / (exact.y * real).norm())


if __name__ == "__main__":
    main()
