"""What a device could compute at most, for the log's MFU (model FLOPs utilisation, Chowdhery et al. 2022, appendix B).

A training step is counted as three forward passes: the backward pass is two. What activation checkpointing computes again
is no useful work and is not counted; nor are the VAE, the text encoder, the optimizer, and everything but matrix products.
"""

from typing import NamedTuple

import torch

FORWARDS_IN_A_STEP = 3


class Peak(NamedTuple):
    """A device's dense rate, and where the figure is from."""

    tflops: float
    source: str


class _Card(NamedTuple):
    """Dense TFLOP/s: bf16 and fp16 with fp32 sums, TF32, and fp32 without tensor cores.

    None for TF32: tensor cores of fp16 only (Volta, Turing), so there is no bf16 either.
    """

    half: float
    tf32: float | None
    fp32: float
    source: str


CARDS = {
    "GB200": _Card(2500, 1250, 80, "NVIDIA GB200 NVL72 data sheet"),
    "B200": _Card(2250, 1125, 75, "NVIDIA HGX B200 data sheet"),
    "H200 NVL": _Card(835.5, 417.5, 60, "NVIDIA H200 data sheet"),
    "GH200": _Card(989.5, 494.5, 67, "NVIDIA GH200 data sheet"),
    "H200": _Card(989.5, 494.5, 67, "NVIDIA H200 data sheet"),
    "H100 PCIe": _Card(756, 378, 51, "NVIDIA H100 PCIe product brief"),
    "H100 NVL": _Card(835.5, 417.5, 60, "NVIDIA H100 data sheet"),
    "H100": _Card(989.5, 494.5, 67, "NVIDIA H100 data sheet"),
    "H800 PCIe": _Card(756, 378, 51, "NVIDIA H100 PCIe product brief, of which it is a variant"),
    "H800": _Card(989.5, 494.5, 67, "NVIDIA H100 data sheet, of which it is a variant"),
    "H20": _Card(148, 74, 44, "NVIDIA H20 data sheet"),
    "A100": _Card(312, 156, 19.5, "NVIDIA A100 data sheet"),
    "A800": _Card(312, 156, 19.5, "NVIDIA A100 data sheet, of which it is a variant"),
    "A40": _Card(149.7, 74.8, 37.4, "NVIDIA A40 data sheet"),
    "A30": _Card(165, 82, 10.3, "NVIDIA A30 data sheet"),
    "A10": _Card(125, 62.5, 31.2, "NVIDIA A10 data sheet"),
    "L40S": _Card(362, 183, 91.6, "NVIDIA L40S data sheet"),
    "L40": _Card(181, 90.5, 90.5, "NVIDIA L40 data sheet"),
    "L4": _Card(121, 60, 30.3, "NVIDIA L4 data sheet"),
    "V100 PCIe": _Card(112, None, 14, "NVIDIA V100 data sheet"),
    "V100": _Card(125, None, 15.7, "NVIDIA V100 SXM2 data sheet"),
    "T4": _Card(65, None, 8.1, "NVIDIA T4 data sheet"),
    "RTX 4090": _Card(165.2, 82.6, 82.6, "NVIDIA Ada architecture white paper"),
    "RTX 3090": _Card(71, 35.6, 35.6, "NVIDIA GA102 architecture white paper"),
}
"""Part of a device's name -> its rates. Where two fit, the longer one counts: an "H100 PCIe" is slower than an "H100".

A plain "H100", "H200" or "V100" is the SXM module. The sheets give rates of Ampere and later with sparsity, or both; these
are the halves. The sheets were not at hand: the numbers were compared with public copies and with reviews (2026-11-28),

- glennklockwood.com/garden/processors: H100, H200 (989.4 / 494.7 / 66.9), A100, B200, GB200; B200's TF32 is 1100 there, from
  a sheet that rounds 2250 with sparsity to 2200, and its fp32 80 for another power limit;
- zdszero.github.io, hardware for AI: B200 and GB200, with sparsity, and 75 and 80 for fp32;
- hmc-tech.com/gpu: H100 PCIe (fp32), A40, A100, T4 (65.13 / 8.14), V100 (113 and 14.1 for PCIe, 125.3 and 15.7 for SXM2);
- mullet.se, product 355414: L40 and L40S; waredb.com: RTX 4090; zangshuxian.com: H20;

and, where these say nothing, with multiprocessors x operations per clock x boost clock: A30 56 x 2048 x 1.44 GHz, A10 72 x
1024 x 1.695 GHz, L4 58 x 1024 x 2.04 GHz, RTX 3090 82 x 512 x 1.695 GHz, H100 PCIe 114 x 4096 x 1.62 GHz. The NVL cards'
835.5 is half of 1671, the number that other programs' tables have too.
"""

OTHER_CARDS = {"Laptop", "Max", "D", "Ti", "SUPER"}
"""Words behind a name that make it another, slower or faster card: "RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 3090 Ti"."""


def known_peak(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> Peak | None:
    """The peak of a GPU by its name (`torch.cuda.get_device_name()`), or None where it is not known.

    Args:
        dtype: of the matrix products. None of a device's rates is for a format that it has to imitate, as V100 does bf16.
        tf32: whether products of fp32 numbers may use TF32 (`torch.get_float32_matmul_precision() != "highest"`).
    """
    words = device_name.replace("-", " ").split()
    if "MIG" in words or OTHER_CARDS & set(words):  # MIG: a slice of the card
        return None
    lower = [word.lower() for word in words]  # "Tesla V100-PCIE-32GB", "NVIDIA H100 PCIe"
    fitting = [name for name in CARDS if _within(name.lower().split(), lower)]
    if not fitting:
        return None
    card = CARDS[max(fitting, key=len)]
    if dtype == torch.bfloat16 and card.tf32 is None:
        return None
    rate = card.half if dtype in (torch.bfloat16, torch.float16) else (tf32 and card.tf32) or card.fp32
    return Peak(rate, card.source)


def _within(part: list[str], words: list[str]) -> bool:
    """Whether `part` stands in `words`, as whole words: "A10" is not in "A100", "A100" is in "A100 SXM4 80GB"."""
    return any(words[i : i + len(part)] == part for i in range(len(words)))
