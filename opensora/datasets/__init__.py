"""From tables of clips to batches of tensors."""

from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.latent_cache import CachedVideoTextDataset
