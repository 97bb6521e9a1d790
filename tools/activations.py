"""How much a denoiser's forward pass keeps for its backward pass, from the model's shape alone.

A formula, not a measurement: it counts the tensors that PyTorch's autograd saves in our blocks, once each, in units of D
values per token (D: width), in the dtype of the computation:

    LayerNorm and modulation   2     its input and its output
    self-attention             7     input, q, k, v, output twice (as attention leaves it and as the projection takes it), gate
      with qk_norm             +4    in fp32 what is normalised, with and without its norm; +9 in half precision; a
                                     GPU's kernel (`acceleration/kernels/head_norm.py`) keeps its results alone, +2
    cross-attention            3     input, q, output
    MLP                        1 + 2 M + 1    input; hidden layer of width M D before and after GELU; gate

A checkpointed part keeps its input alone, and needs its own memory once while it is recomputed. In
addition, autocast keeps a copy of every weight in half precision. Text tokens, embedders and the final layer are left out:
a few percent. Compiled blocks recompute some of it: about an eighth less. tests/tools/test_estimate.py compares the
formula with what is saved, for every family of models.
"""

from typing import NamedTuple

from torch import nn

from opensora.config.schema import checkpointed_parts
from opensora.models.denoiser import Denoiser
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.mlp import Mlp

NORM, SELF, CROSS = 2.0, 7.0, 3.0
QK_NORM, KERNELS_QK_NORM = {4: 4.0, 2: 9.0}, 2.0  # by bytes of a value; with our kernel
COMPILED = 7 / 8


class BlockUnits(NamedTuple):
    """Of one block, in units of D numbers per token."""

    total: float
    mlp: float  # of its MLP alone
    products: float  # outputs of matrix products and attention, which "selective" keeps
    attention: float  # outputs of attention, which "attention" keeps


def block_units(block: nn.Module, num_bytes: int, *, kernels: bool = False) -> BlockUnits:
    """What a block keeps; `num_bytes`, `kernels`: see `activation_bytes`."""
    total = mlp = products = attention = 0.0
    for module in block.modules():
        if isinstance(module, Attention):
            total += SELF
            if not isinstance(module.q_norm, nn.Identity):
                fused = kernels and module.norm_order == "norm_then_rope"
                total += KERNELS_QK_NORM if fused else QK_NORM[num_bytes]
            attention += 1.0
            products += 5.0  # qkv, attention, projection
        elif isinstance(module, CrossAttention):
            total += CROSS
            attention += 1.0
            products += CROSS  # q, attention, projection
        elif isinstance(module, Mlp):
            assert isinstance(module.fc1, nn.Linear)
            ratio = module.fc1.out_features / module.fc1.in_features
            mlp += 2 + 2 * ratio
            products += ratio + 1
        elif isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm"):
            total += NORM
    return BlockUnits(total + mlp, mlp, products + 1, attention)


def activation_bytes(
    model: Denoiser,
    tokens: float,
    num_bytes: int,
    level: str,
    *,
    compiled: bool = False,
    kernels: bool = False,
) -> float:
    """The largest sum of what is kept at one time.

    Args:
        model: a denoiser, on any device, also "meta".
        tokens: of all samples of a batch that this process holds, B N / sp_size.
        num_bytes: 4 for fp32, 2 for bf16 and fp16.
        level: a value of `grad_checkpoint`.
        compiled: whether the blocks are compiled.
        kernels: whether our kernels compute, as they do on a GPU.
    """
    blocks = model.transformer_blocks()
    units, again = 0.0, 0.0
    for block, part in zip(blocks, checkpointed_parts(level, len(blocks)), strict=True):
        of = block_units(block, num_bytes, kernels=kernels)
        less = COMPILED if compiled else 1.0
        kept, missing = _kept(of, part)
        units += kept if part == "block" else kept * less
        again = max(again, missing * less)
    return (units + again) * tokens * model.hidden_size * num_bytes


def _kept(of: BlockUnits, part: str) -> tuple[float, float]:
    """What a block keeps of which `part` is checkpointed, and what is then recomputed."""
    if part == "nothing":
        return of.total, 0.0
    if part == "block":
        return 1.0, of.total
    if part == "mlp":
        return of.total - of.mlp + 1.0, of.mlp
    if part == "attention":
        return of.attention + 1.0, of.total - of.attention
    return of.products, of.total - of.products
