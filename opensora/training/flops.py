"""What a device could compute at most, for the log's MFU (model FLOPs utilisation, Chowdhery et al. 2022, appendix B).

A training step is counted as three forward passes: the backward pass is two. What activation checkpointing computes again
is not counted, nor are the VAE, the text encoder, the optimizer, and everything but matrix products.
"""

from typing import NamedTuple

import torch

FORWARDS_IN_A_STEP = 3


class Peak(NamedTuple):
    """A device's dense rate."""

    tflops: float
    source: str


class Card(NamedTuple):
    """Dense TFLOP/s: bf16 and fp16 with fp32 sums, TF32 (None: there is neither TF32 nor bf16), fp32 without tensor cores."""

    half: float
    tf32: float | None
    fp32: float


# Sheets give rates with sparsity, or both; these are the halves. docs/reference/log.md names the sheet of each.
CARDS = {
    "GB200": Card(2500, 1250, 80),
    "B200": Card(2250, 1125, 75),
    "H200 NVL": Card(835.5, 417.5, 60),
    "GH200": Card(989.5, 494.5, 67),
    "H200": Card(989.5, 494.5, 67),
    "H100 PCIe": Card(756, 378, 51),
    "H100 NVL": Card(835.5, 417.5, 60),
    "H100": Card(989.5, 494.5, 67),
    "H800 PCIe": Card(756, 378, 51),
    "H800": Card(989.5, 494.5, 67),
    "H20": Card(148, 74, 44),
    "A100": Card(312, 156, 19.5),
    "A800": Card(312, 156, 19.5),
    "A40": Card(149.7, 74.8, 37.4),
    "A30": Card(165, 82, 10.3),
    "A10": Card(125, 62.5, 31.2),
    "L40S": Card(362, 183, 91.6),
    "L40": Card(181, 90.5, 90.5),
    "L4": Card(121, 60, 30.3),
    "V100 PCIe": Card(112, None, 14),
    "V100": Card(125, None, 15.7),
    "T4": Card(65, None, 8.1),
    "RTX 4090": Card(165.2, 82.6, 82.6),
    "RTX 3090": Card(71, 35.6, 35.6),
}
"""Part of a device's name -> its rates; where two fit, the longer one counts. A plain "H100", "H200" or "V100" is the SXM module."""

# words that make a name that of another, slower or faster card, or of a slice: "RTX 4090 Laptop GPU", "RTX 3090 Ti"
OTHER_CARDS = {"MIG", "Laptop", "Max", "D", "Ti", "SUPER"}


def known_peak(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> Peak | None:
    """The peak of a GPU by its name (`torch.cuda.get_device_name()`), or None where it is not known.

    Args:
        dtype: of the matrix products; a dtype that a device imitates, as V100 does bf16, has no peak.
        tf32: whether products of fp32 numbers may use TF32 (`torch.get_float32_matmul_precision() != "highest"`).
    """
    words = device_name.replace("-", " ").split()
    if OTHER_CARDS & set(words):
        return None
    name = f" {' '.join(words).lower()} "  # whole words: "A10" is not in "A100"; "Tesla V100-PCIE-32GB" has "V100 PCIe"
    fitting = [card for card in CARDS if f" {card.lower()} " in name]
    if not fitting:
        return None
    found = max(fitting, key=len)
    card = CARDS[found]
    if dtype == torch.bfloat16 and card.tf32 is None:
        return None
    rate = card.half if dtype in (torch.bfloat16, torch.float16) else (tf32 and card.tf32) or card.fp32
    return Peak(rate, f"NVIDIA's data sheet of {found}")


def device_peak(device: torch.device, dtype: torch.dtype, given_tflops: float | None = None) -> Peak | None:
    """The peak rate of this device in `dtype`: `given_tflops`, or that of the GPU's name; None where neither is known."""
    if given_tflops is not None:
        return Peak(given_tflops, "peak_tflops")
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return known_peak(torch.cuda.get_device_name(device), dtype, tf32=tf32)


def describe_peak(peak: Peak | None) -> str:
    """What MFU means in this run."""
    if peak is None:
        return "no MFU: the peak of this device is not known; --peak-tflops sets it"
    return f"MFU is of {peak.tflops:g} TFLOP/s for each device ({peak.source})"
