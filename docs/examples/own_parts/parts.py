"""A denoiser, a dataset and a scheduler of one's own, in a file outside the package: see docs/own-parts.md.

python scripts/train.py docs/examples/own_parts/train.py
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opensora.checkpoint.load import load_strictly, read_weights
from opensora.datasets.sampler import SampleKey
from opensora.models.denoiser import Denoiser, Size
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.registry import DATASETS, MODELS, SCHEDULERS
from opensora.schedulers.guidance import guidance_from_config
from opensora.schedulers.sampling import Denoise, Sampler
from opensora.utils.seed import generator, randn_like


class MLPBlock(nn.Module):
    """Mixes channels, then sums up the other positions: no attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.here, self.everywhere = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x [B, T, S, D]`."""
        h = self.norm(x)
        mixed = self.here(h) + self.everywhere(h).mean(dim=(1, 2), keepdim=True)
        return x + self.out(nn.functional.gelu(mixed))


@MODELS.register_module()
class TokenMLP(Denoiser):
    """A toy denoiser. `in_channels`, `caption_channels` and `model_max_length` are given by VAE and text encoder."""

    def __init__(
        self,
        *,
        in_channels: int = 4,
        caption_channels: int = 384,
        model_max_length: int = 48,
        hidden_size: int = 64,
        depth: int = 2,
        from_pretrained: str | None = None,
    ) -> None:
        super().__init__(in_channels=in_channels, hidden_size=hidden_size, depth=depth, num_heads=1)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        self.blocks = nn.ModuleList(MLPBlock(hidden_size) for _ in range(depth))
        self.final = nn.Linear(hidden_size, 4 * self.out_channels)
        if from_pretrained is not None:
            load_strictly(
                self, read_weights(from_pretrained), from_pretrained
            )  # a file, or a checkpoint folder of ours

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        *,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        fps: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        num_frames: Tensor | None = None,
    ) -> Tensor:
        """See `Denoiser.forward`; the caption is the mean of its real tokens, and x_mask and sizes are not used."""
        text = self.y_embedder(y).squeeze(1)  # [B, L, D]
        real = torch.ones_like(text[..., :1]) if mask is None else mask[..., None].to(text)
        condition = self.t_embedder(timestep) + (text * real).sum(1) / real.sum(1).clamp(min=1)  # [B, D]
        tokens = self.patchify(x) + condition[:, None, None]
        for block in self.blocks:
            tokens = block(tokens)
        return self.unpatchify(self.final(tokens), x.shape[2:])

    def null_condition(self, batch: int) -> Tensor:
        """The learnt "no text"."""
        return self.y_embedder.null(batch)

    def transformer_blocks(self) -> list[nn.Module]:
        """What is compiled, checkpointed and sharded."""
        return list(self.blocks)

    def flops(self, latent_size: Size, text_len: int) -> int:
        """Three square layers a block and token, and the patches; the MLPs of caption and timestep are left out."""
        T, H, W = self.grid(latent_size)
        patches = 8 * (self.in_channels + self.out_channels)
        return T * H * W * self.hidden_size * (6 * len(self.blocks) * self.hidden_size + patches)


@DATASETS.register_module()
class MovingSquares:
    """White squares that move to the left or right; every sample is a function of seed, epoch and index."""

    def __init__(
        self, num_clips: int = 64, num_frames: int = 8, image_size: Sequence[int] = (32, 32), seed: int = 42
    ) -> None:
        self.num_clips, self.num_frames, self.image_size, self.seed = num_clips, num_frames, tuple(image_size), seed

    def __len__(self) -> int:
        return self.num_clips

    def __getitem__(self, key: SampleKey) -> dict:
        rng = generator(self.seed, "squares", key.epoch, key.index)
        (height, width), right = self.image_size, key.index % 2 == 0
        top, left = (int(torch.randint(size // 2, (1,), generator=rng)) for size in (height, width))
        video = torch.full((3, self.num_frames, height, width), -1.0)
        for t in range(self.num_frames):
            x = (left + (t if right else -t)) % (width - 8)
            video[:, t, top : top + 8, x : x + 8] = 1.0
        sizes = {"fps": 8, "num_frames": self.num_frames, "height": height, "width": width}
        return {
            "video": video,  # [3, T, H, W] in [-1, 1]
            "text": f"a white square moves {'right' if right else 'left'}",
            **{name: torch.tensor(float(value)) for name, value in sizes.items()},
            "index": torch.tensor(key.index),
            "path": f"square {key.index}",
        }

    def fingerprint(self) -> str:
        """Names the data, so that a resume requires the same."""
        settings = repr((self.num_clips, self.num_frames, self.image_size, self.seed))
        return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()


class EulerSteps:
    """One run of `DataFlow`'s sampler."""

    def __init__(self, num_steps: int) -> None:
        self.levels = [1 - i / num_steps for i in range(num_steps)]  # noise left before each step
        self.timesteps = [1000 * level for level in self.levels]  # the model's conditioning timesteps

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        """x_0 at the level of a step, for frames that are edited."""
        return (1 - self.levels[index]) * x_0 + self.levels[index] * noise

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x after the step, and the predicted x_0."""
        x_0 = denoise(x, self.timesteps[index])
        kept = (self.levels[index + 1] if index + 1 < len(self.levels) else 0.0) / self.levels[index]
        return kept * x + (1 - kept) * x_0, x_0


@SCHEDULERS.register_module("data-flow")
class DataFlow(Sampler):
    """A straight path from noise to data, with a model that predicts the data."""

    def __init__(self, num_sampling_steps: int = 10, cfg_scale: float = 1.0) -> None:
        self.guidance = guidance_from_config(cfg_scale, None, None)
        self._num_sampling_steps = num_sampling_steps

    @property
    def num_sampling_steps(self) -> int:
        """Steps of a run."""
        return self._num_sampling_steps

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> EulerSteps:
        """The sampling half; guidance, conditioning frames and previews come with the base class."""
        return EulerSteps(self.num_sampling_steps)

    def training_losses(self, model, x0, cond, *, mask=None, t=None, noise=None, generators=None) -> Tensor:  # [B]
        """The training half. One generator a sample: a sample's noise does not depend on its batch."""
        if t is None:
            t = torch.stack([torch.rand((), generator=rng, device=x0.device) for rng in generators]) * 1000
        noise = randn_like(x0, generators) if noise is None else noise
        level = (t / 1000).reshape(-1, 1, 1, 1, 1)
        x_t = (1 - level) * x0 + level * noise
        error = (model(x_t, t, **cond) - x0) ** 2  # [B, C, T, H, W]
        return error.mean(dim=(1, 2, 3, 4))
