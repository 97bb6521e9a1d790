from opensora.datasets.cache.buckets import write_buckets
from opensora.datasets.cache.buckets_dataset import CachedVariableVideoTextDataset
from opensora.datasets.cache.dataset import CachedVideoTextDataset
from opensora.datasets.cache.features import write_text
from opensora.datasets.cache.moments import source_hash, write_clips, write_samples
from opensora.datasets.cache.records_dataset import RecordVideoTextDataset
