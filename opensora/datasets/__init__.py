"""From tables of clips to batches of tensors."""

from opensora.datasets.cache import CachedVariableVideoTextDataset, CachedVideoTextDataset
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.image_folder import ImageFolderDataset
from opensora.datasets.in_memory import InMemoryVideoDataset
from opensora.datasets.variable_dataset import VariableVideoTextDataset
