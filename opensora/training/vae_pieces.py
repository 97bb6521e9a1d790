"""A batch of clips, cut for one step of a VAE's training: lengths are mixed by splitting, so that every step costs the same."""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from opensora.utils.seed import generator, generators


class Pieces:
    """Cuts clips into pieces of a length that is drawn for each batch; a function of (seed, step, micro-batch, place).

    Args:
        lengths: Numbers of frames, each as likely as it is often named; None keeps the clips whole.
        seed: The run's.
        device: Where the pieces and their generators are to be.
    """

    def __init__(self, lengths: Sequence[int] | None, seed: int, device: torch.device | str) -> None:
        self.lengths, self.seed, self.device = lengths, seed, torch.device(device)

    def __call__(
        self, video: Tensor, places: Sequence[int], step: int, micro_batch: int
    ) -> tuple[Tensor, list[torch.Generator], int]:
        """video [B, 3, T, H, W] of samples at `places` of the whole batch -> pieces, their generators, and a number.

        Pieces are [B n, 3, L, H, W]: n = T // L of every clip, one after another, from a random first frame. All processes
        draw the same L. The number, in [0, T), is for whoever picks frames of a piece.
        """
        frames = video.shape[2]
        rng = generator(self.seed, "pieces", step, micro_batch)
        length = frames
        if self.lengths is not None:
            length = self.lengths[int(torch.randint(len(self.lengths), (1,), generator=rng))]
        count = frames // length
        start = int(torch.randint(frames - count * length + 1, (1,), generator=rng))
        offset = int(torch.randint(frames, (1,), generator=rng))
        # the whole clips travel: a cut is a copy, whose memory is not pinned
        video = video.to(self.device, non_blocking=True)
        cut = rearrange(video[:, :, start : start + count * length], "B C (n L) H W -> (B n) C L H W", n=count)
        ids = [place * frames + piece for place in places for piece in range(count)]
        rngs = generators(self.seed, "train", step, ids=ids, device=self.device)
        return cut, rngs, offset
