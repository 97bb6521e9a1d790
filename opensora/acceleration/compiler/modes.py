"""The words of a mode string, `"max-optimize:max-autotune:low-precision"`, and what each sets in today's PyTorch.

Their meaning is documented in OneDiff's README; nexfort, which gave them effect, is closed. The order of words does not
matter: where two set the same, the later row of `MODES` wins.
"""

from collections.abc import Mapping
from typing import NamedTuple

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError


class Mode(NamedTuple):
    """A word: what it means, and the settings of inductor that it makes."""

    meaning: str
    inductor: Mapping[str, bool]


MODES: dict[str, Mode] = {
    "cache-all": Mode(
        "keep everything that is compiled on disk",
        {"fx_graph_cache": True, "fx_graph_remote_cache": False, "autotune_local_cache": True},
    ),
    "max-autotune": Mode("time kernels of matrix products and convolutions, take the fastest", {"max_autotune": True}),
    "max-optimize": Mode(
        "fuse more, tune the generated kernels; slow to compile",
        {
            "coordinate_descent_tuning": True,
            "coordinate_descent_check_all_directions": True,
            "conv_1x1_as_mm": True,
            "aggressive_fusion": True,
        },
    ),
    "low-precision": Mode("TF32, and sums of fp16 and bf16 products in short formats, while the module runs", {}),
    "cudagraphs": Mode("record CUDA graphs, one for each size", {"triton.cudagraphs": True}),
    "freezing": Mode("weights become constants; inference only, and they cannot change any more", {"freezing": True}),
    "benchmark": Mode(
        "fuse only where a measurement says that it pays", {"benchmark_fusion": True, "benchmark_kernel": True}
    ),
    "quant": Mode("quantise the weights of linear layers with torchao, before compiling", {}),
    "jit": Mode("compile quickly: the repeated blocks alone, or, where there are none, without inductor", {}),
    "disable-runtime-fusion": Mode(
        "do not fuse into matrix products; quicker to compile", {"epilogue_fusion": False, "prologue_fusion": False}
    ),
}
_ALMOST_ALL = ("max-optimize", "max-autotune", "low-precision", "cache-all")
COMBINATIONS: dict[str, tuple[str, ...]] = {"O2": _ALMOST_ALL, "O3": _ALMOST_ALL}


def parse_mode(mode: str) -> tuple[frozenset[str], bool]:
    """The words of a mode string, combinations spelt out; and whether fp16 and bf16 products may be summed in short formats.

    The latter is what O3 does and O2 does not.

    Raises:
        UserError: a word is none of `MODES` and `COMBINATIONS`, or there are both O2 and O3.
    """
    words = {word.strip() for word in mode.split(":") if word.strip()}
    known = [*MODES, *COMBINATIONS]
    for word in sorted(words - set(known)):
        raise UserError(f"mode {mode!r}: no word {word!r}.{did_you_mean(word, known)} Words: {', '.join(known)}.")
    if COMBINATIONS.keys() <= words:
        raise UserError(f"mode {mode!r}: O2 and O3 differ in precision; keep one.")
    chosen = {part for word in words for part in COMBINATIONS.get(word, (word,))}
    return frozenset(chosen), "low-precision" in chosen and "O2" not in words


def inductor_settings(words: frozenset[str]) -> dict[str, bool | str]:
    """What the words set in inductor together."""
    settings: dict[str, bool | str] = {}
    for word, mode in MODES.items():
        if word in words:
            settings |= mode.inductor
    return settings
