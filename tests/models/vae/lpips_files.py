"""Files in the format of stlpips-pytorch: with random weights, or the package's own where it is installed or fetched."""

import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file

ALEX = {0: (64, 3, 11), 5: (192, 64, 5), 9: (384, 192, 3), 11: (256, 384, 3), 13: (256, 256, 3)}  # layer: out, in, side
BLURS = {1: 64, 4: 64, 8: 192}
SLICE = {0: 1, 1: 1, 4: 2, 5: 2, 8: 3, 9: 3, 11: 4, 13: 5}
FETCHED = Path(__file__).parents[3] / "data" / "sources" / "stlpips-pytorch"


def random_alex(path: Path) -> Path:
    """An AlexNet LPIPS with random weights."""
    rng = torch.Generator().manual_seed(0)
    state = {"scaling_layer.shift": torch.tensor([-0.03, -0.088, -0.188]).view(1, 3, 1, 1)}
    state["scaling_layer.scale"] = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
    for layer, (out, channels, side) in ALEX.items():
        scale = (channels * side * side) ** -0.5
        state[f"net.slice{SLICE[layer]}.{layer}.weight"] = torch.randn(out, channels, side, side, generator=rng) * scale
        state[f"net.slice{SLICE[layer]}.{layer}.bias"] = torch.randn(out, generator=rng) * 0.1
    for layer, channels in BLURS.items():
        blur = torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([1.0, 2.0, 1.0])) / 16
        state[f"net.slice{SLICE[layer]}.{layer}.filt"] = blur.expand(channels, 1, 3, 3).contiguous()
    for i, channels in enumerate((64, 192, 384, 256, 256)):
        state[f"lin{i}.model.1.weight"] = torch.rand(1, channels, 1, 1, generator=rng)
    save_file(state, path)
    return path


def package_folder() -> Path | None:
    """Where stlpips_pytorch lies: installed, or unpacked by assets/build/fetch_sources.py."""
    spec = importlib.util.find_spec("stlpips_pytorch")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return FETCHED / "stlpips_pytorch" if (FETCHED / "stlpips_pytorch").is_dir() else None
