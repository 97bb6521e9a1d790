"""Peaks by the names that drivers report, and the parts of a training step that count."""

import pytest
import torch

from opensora.training.flops import CARDS, describe_peak, device_peak, known_peak


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H200", torch.bfloat16, 989.5),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H800 PCIe", torch.bfloat16, 756),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.5),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA B200", torch.bfloat16, 2250),
    ],
)
def test_cards_by_name(name, dtype, tflops):
    peak = known_peak(name, dtype)
    assert peak is not None
    assert peak.tflops == tflops
    assert peak.source


def test_tf32_where_it_is_allowed_and_exists():
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True).tflops == 156
    assert known_peak("Tesla V100-SXM2-32GB", torch.float32, tf32=True).tflops == 15.7
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16, tf32=True).tflops == 312


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A1000", "Radeon", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GeForce GT 4090", "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
    ],
)  # fmt: skip
def test_others_are_not_known(name):
    assert known_peak(name, torch.bfloat16) is None


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "Tesla T4"])
def test_a_format_that_a_device_imitates_has_no_peak(name):
    assert known_peak(name, torch.bfloat16) is None
    assert known_peak(name, torch.float16) is not None


def test_mfu_needs_a_peak():
    cpu = torch.device("cpu")
    assert "--peak-tflops" in describe_peak(device_peak(cpu, torch.bfloat16))
    given = device_peak(cpu, torch.bfloat16, 12.5)
    assert describe_peak(given) == "MFU is of 12.5 TFLOP/s for each device (peak_tflops)"


def test_the_docs_have_the_same_table(repo_root):
    text = (repo_root / "docs" / "reference" / "log.md").read_text()
    for name, card in CARDS.items():
        tf32 = "-" if card.tf32 is None else f"{card.tf32:g}"
        assert f"| {name} | {card.half:g} | {tf32} | {card.fp32:g} | " in text
