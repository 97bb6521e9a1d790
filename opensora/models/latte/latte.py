"""Latte, the latent diffusion transformer for videos (Ma et al. 2024, arXiv:2401.03048), variant 1 of its section 3.1.

DiT's blocks, in turn over the tokens of a frame (even blocks) and over the frames at each spatial position (odd blocks). Temporal
positions are added once, right before the first temporal block, as in the released code and in Open-Sora.
"""

from torch import Tensor

from opensora.models.dit.dit import SIZES, DiT
from opensora.registry import MODELS


@MODELS.register_module()
class Latte(DiT):
    """Latent diffusion transformer for videos (see the module's docstring).

    The arguments are DiT's; depth is even. A single frame gets its temporal position too, as in training.
    """

    axes = ("space", "time")

    def _transform(
        self, x: Tensor, c: Tensor, x_mask: Tensor | None, c0: Tensor | None, grid: tuple[int, int]
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 1 and not self.no_temporal_pos_emb:
                x = x + self.temporal_positions(x)
            x = block(x, c, x_mask, c0, grid)
        return x


for _size, _preset in SIZES.items():
    for _p in (2, 4, 8):
        MODELS.register_variant(f"Latte-{_size}/{_p}", Latte, **_preset, patch_size=(1, _p, _p))
MODELS.register_variant("Latte-XL/2x2", Latte, **SIZES["XL"], patch_size=(2, 2, 2))
