"""The frozen parts at full size with random weights: VAEs and T5."""

import argparse
import csv
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import T5Config, T5EncoderModel

from opensora.models.text_encoder.hf import HFTextEncoder, Padding
from opensora.models.text_encoder.t5 import T5Encoder, compile_blocks_of
from opensora.models.vae.base import VideoVAE
from opensora.registry import MODELS
from opensora.utils.dtype import DTYPES, to_torch_dtype
from opensora.utils.seed import generator
from tools.benchmark.measure import Options, Table, attempt, peak_gib, relative_error, reset_peak, seconds, synchronize

# Stable Diffusion's VAE; Wan 2.1's is its class's default
VAES: dict[str, dict[str, Any]] = {
    "sd": {
        "type": "VideoAutoencoderKL",
        "architecture": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
    },
    "wan": {"type": "DiffusersVideoVAE", "architecture": {"type": "AutoencoderKLWan"}},
}
TOY_VAES: dict[str, dict[str, Any]] = {
    "sd": {"type": "VideoAutoencoderKL", "architecture": {"block_out_channels": (32, 32, 32, 32)}},
    "wan": {"type": "DiffusersVideoVAE", "architecture": {"type": "AutoencoderKLWan", "base_dim": 16}},
}
VAE_WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "channels last": {"memory_format": "channels_last"},
    "compiled": {"memory_format": "channels_last", "compile": True},
}
SPEED_COLUMNS = {
    "VAE": "", "dtype": "", "way": "", "encode frames/s": ".1f", "decode frames/s": ".1f", "peak GiB encode": ".1f", "decode": ".1f",
    "error encode": ".2g", "error decode": ".2g",
}  # fmt: skip
MEMORY_COLUMNS = {
    "VAE": "",
    "settings": "",
    "encode s": ".2f",
    "decode s": ".2f",
    "peak GiB encode": ".1f",
    "decode": ".1f",
}


def vae(argv: Sequence[str]) -> None:
    """Measure VAEs at full size, with random weights: encoding and decoding in every dtype and layout.

    First table: frames a second, of one video, one line for each way of running the same network. Second table, on a GPU: peak
    memory (weights and input included) of one large video, whole, in micro-batches, in tiles and in both. On a GPU, cuDNN chooses its
    algorithms by trial and multiplies fp32 in TF32, as in training. Errors are |line - first line| / |first line| of the VAE's
    moments and frames: list fp32 first.
    """
    options = Options("vae", vae.__doc__, argv)
    options.add("--vaes", ["sd", "wan"], ["sd"], choices=tuple(VAES))
    options.add("--ways", list(VAE_WAYS), ["eager"], choices=tuple(VAE_WAYS))
    options.add_argument("--compiled", nargs="*", default=["sd"], choices=tuple(VAES), help="VAEs to compile, too")
    options.add("--formats", ["fp32", "fp16", "bf16"], ["fp32"], choices=("fp32", "fp16", "bf16"))
    options.add("--size", [512, 512], [32, 32], nargs=2, metavar=("H", "W"))
    options.add("--large", [1024, 1024], [64, 64], nargs=2, metavar=("H", "W"), help="for memory")
    options.add("--frames", 16, 4, help="the nearest number that a VAE takes is used")
    options.add("--seconds", 0.5, 0.0, help="to time each line for, at least")
    args, device = options.parse(), options.device
    torch.backends.cudnn.benchmark = True
    options.heading(f"{args.frames} frames of {args.size[0]}x{args.size[1]} at a time")

    def both(
        name: str, settings: dict[str, Any], size: list[int], least_s: float
    ) -> tuple[list[Any], list[Tensor], int]:
        """Seconds and peaks of encoding and of decoding (or texts), what they gave, and the number of frames."""
        network, x, z = build_vae(args, name, settings, size, device)
        calls: tuple[Callable[[], Tensor], ...] = (lambda: network.moments(x), lambda: network.decode(z, x.shape[2]))
        taken = [attempt(lambda: time_call(call, device, least_s)) for call in calls]  # noqa: B023
        times, peaks, found = ([one if isinstance(one, str) else one[i] for one in taken] for i in range(3))
        tensors = [one for one in found if isinstance(one, Tensor)]
        return [*times, *peaks], tensors if len(tensors) == len(calls) else [], x.shape[2]

    table = Table(SPEED_COLUMNS)
    with torch.inference_mode():
        for name in args.vaes:
            exact: list[Tensor] = []
            for dtype, way in itertools.product(args.formats, args.ways):
                # compiling takes most of the time: one dtype shows what it is worth
                if way == "compiled" and not (name in args.compiled and dtype == args.formats[-1]):
                    continue
                found = attempt(lambda: both(name, {"dtype": dtype, **VAE_WAYS[way]}, args.size, args.seconds))  # noqa: B023
                if isinstance(found, str):
                    table.row(name, dtype, way, found)
                    continue
                cells, results, frames = found
                exact = exact or results
                errors = [relative_error(*pair) for pair in zip(results, exact, strict=False)]
                rates = [cell if isinstance(cell, str) else frames / cell for cell in cells[:2]]
                table.row(name, dtype, way, *rates, *cells[2:], *errors)
        if device.type == "cpu":
            return
        dtype = args.formats[-1]
        print(f"\n{args.frames} frames of {args.large[0]}x{args.large[1]}, {dtype}, channels last\n")
        table = Table(MEMORY_COLUMNS)
        for name in args.vaes:
            for settings in memory_settings(name, args.large):
                text = ", ".join(f"{key}={value}" for key, value in settings.items()) or "whole"
                layout = {"dtype": dtype, "memory_format": "channels_last"}
                found = attempt(lambda: both(name, {**layout, **settings}, args.large, 0.0))  # noqa: B023
                table.row(name, text, *([found] if isinstance(found, str) else found[0]))


def memory_settings(name: str, size: list[int]) -> list[dict[str, Any]]:
    """Ways to need less memory."""
    tile = {"tile_size": min(size) // 2}
    if VAES[name]["type"] == "VideoAutoencoderKL":
        return [{}, {"micro_batch_size": 4}, {"micro_batch_size": 1}, tile, {"micro_batch_size": 1, **tile}]
    return [{}, tile]


def build_vae(
    args: argparse.Namespace, name: str, settings: dict[str, Any], size: list[int], device: torch.device
) -> tuple[VideoVAE, Tensor, Tensor]:
    """A VAE with random weights, the same for every line; noise in place of a video [1, 3, T, H, W] and of latents."""
    torch.manual_seed(0)
    with device:
        network: VideoVAE = MODELS.build({**(TOY_VAES if args.toy else VAES)[name], **settings})
    network.requires_grad_(False).eval()
    frames = network.legal_num_frames(args.frames)
    x = torch.rand(1, 3, frames, *size, generator=generator(0)) * 2 - 1
    z = torch.randn(1, network.out_channels, *network.latent_size((frames, size[0], size[1])), generator=generator(1))
    return network, x.to(device), z.to(device)


def time_call(call: Callable[[], Tensor], device: torch.device, least_s: float) -> tuple[float, float | None, Tensor]:
    """Seconds of a call after the first, over as many as fill `least_s`, the peak in GiB, and what it gives, in fp32 on the CPU."""
    found = call().float().cpu()
    reset_peak(device)
    first = seconds(call, device)
    repeats = int(least_s / first)
    taken = seconds(call, device, repeats) if repeats > 1 else first
    return taken, peak_gib(device), found


# ---------------------------------------------------------------------------------------------------------------- T5

ASSETS = Path(__file__).resolve().parents[2] / "assets"
VOCABULARY, CLIPS = ASSETS / "tokenizers" / "t5", ASSETS / "clips" / "clips.csv"
SIZES = {  # d_model, d_ff, layers, heads (of 64 but for tiny) of T5 v1.1
    "tiny": (64, 128, 2, 4),
    "base": (768, 2048, 12, 12),
    "xxl": (4096, 10240, 24, 64),
}
T5_WAYS: tuple[tuple[str, bool, Padding], ...] = (("as it is", False, "max_length"), ("compiled", True, "max_length"),
        ("longest", False, "longest"), ("compiled, longest", True, "longest"))  # fmt: skip
TEXT_COLUMNS = {"way": "", "captions/s": ".1f", "first call, s": ".1f", "peak GiB": ".2f", "relative error": ".2%"}


class Encoded(NamedTuple):
    """One row."""

    captions_per_s: float
    first_s: float
    peak_gib: float | None
    y: Tensor  # [B, 1, L, D] of the first batch
    mask: Tensor


def text_encoder(argv: Sequence[str]) -> None:
    """Count captions a second of T5's encoder, with random weights and T5's own vocabulary.

    The captions are those of assets/clips. Compared: the network as it is, with compiled blocks (`shardformer=True`), and each of
    them computing only up to a batch's longest caption (`padding="longest"`). Tokenizing and cleaning are part of the time.
    Relative error: of real tokens, against the first row, so in bf16 it says how far one rounding is from another.
    """
    options = Options("text_encoder", text_encoder.__doc__, argv, device="any")
    options.add("--size", "xxl", "tiny", choices=list(SIZES))
    options.add("--length", 120, 120, help="model_max_length; 120 and 300 are Open-Sora's")
    options.add("--batch", 32, 4)
    options.add("--dtype", "bf16", "bf16", choices=sorted(DTYPES))
    options.add("--ways", [way for way, *_ in T5_WAYS], ["as it is", "longest"], choices=[way for way, *_ in T5_WAYS])
    options.add("--seconds", 3.0, 0.1, help="for each row, after the first call")
    args, device = options.parse(), options.device
    options.heading(f"T5 {args.size}, {args.dtype}, {args.length} tokens, batch {args.batch}")
    table = Table(TEXT_COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder), args.size, to_torch_dtype(args.dtype), device)
        encoder = T5Encoder(folder, model_max_length=args.length, dtype=args.dtype).to(device)
        first: Encoded | None = None
        for label, fast, padding in T5_WAYS:  # one encoder, as reading gigabytes takes longer than measuring
            if label not in args.ways:
                continue
            set_way(encoder, fast=fast, padding=padding)
            found = encode(encoder, args.batch, args.seconds)
            first = first or found
            real = first.mask[:, None, :, None]
            table.row(label, *found[:3], relative_error(found.y * real, first.y * real))


def set_way(encoder: HFTextEncoder, *, fast: bool, padding: Padding) -> None:
    """Make the encoder what `shardformer` and `padding` in its constructor would make it."""
    encoder.padding = padding
    for block in encoder.model.encoder.block:
        block.__dict__.pop("forward", None)  # a compiled one
    if fast:
        torch._dynamo.reset()
        compile_blocks_of(encoder.model, varying_sizes=padding == "longest")


def write_encoder(folder: Path, size: str, dtype: torch.dtype, device: torch.device) -> None:
    """A T5 folder with random weights in `dtype`, scaled as T5's own, so that features stay of order 1.

    T5 does not divide its attention's scores by sqrt(d_kv): queries are smaller by that. With larger ones attention picks one token,
    and which one depends on a rounding.
    """
    d_model, d_ff, layers, heads = SIZES[size]
    config = T5Config(
        vocab_size=32128, d_model=d_model, d_ff=d_ff, d_kv=64 if size != "tiny" else 16, num_layers=layers,
        num_heads=heads, feed_forward_proj="gated-gelu", is_encoder_decoder=False,
    )  # fmt: skip
    with torch.device("meta"):
        state = T5EncoderModel(config).state_dict()
    rng = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, like in state.items():
        if name == "encoder.embed_tokens.weight":  # the same as `shared`
            continue
        weight = torch.empty(like.shape, dtype=dtype, device=device)
        if "layer_norm" in name:
            weights[name] = weight.fill_(1).cpu()
            continue
        std = 1.0 if "shared" in name else like.shape[-1] ** -0.5
        std *= config.d_kv**-0.5 if name.endswith(".q.weight") else 1.0
        weights[name] = weight.normal_(std=std, generator=rng).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["T5EncoderModel"]}))
    for file in VOCABULARY.glob("*[!d]"):  # not its README.md
        shutil.copy(file, folder)


def captions(batch: int) -> Iterator[list[str]]:
    """Batches of the repository's captions, over and over."""
    with CLIPS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    texts = [row[column] for column in ("text", "text_2", "text_3", "text_4", "text_5", "text_6") for row in rows]
    endless = itertools.cycle(texts)
    while True:
        yield list(itertools.islice(endless, batch))


def encode(encoder: Any, batch: int, least_s: float) -> Encoded:
    """The first call, which compiles; another four, which meet other lengths; then as many as fit into the time."""
    device, batches = encoder.device, captions(batch)
    reset_peak(device)
    synchronize(device)
    start = time.perf_counter()
    y, mask = encoder.encode(next(batches))
    synchronize(device)
    first_s = time.perf_counter() - start
    seconds(lambda: encoder.encode(next(batches)), device, 4)
    spent, count = 0.0, 0
    while not count or spent < least_s:
        spent += seconds(lambda: encoder.encode(next(batches)), device)
        count += batch
    return Encoded(count / spent, first_s, peak_gib(device), y, mask)
