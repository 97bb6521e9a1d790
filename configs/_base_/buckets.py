"""Training on images and videos of many sizes and lengths: what `_base_/train.py` sets, and buckets.

docs/how-to/buckets.md explains bucket_config, which each config sets. `python -m tools.datasets.doctor CONFIG --data-path clips.csv
--processes 8` shows how many of your samples fit.
"""

_base_ = "train.py"

dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
frame_interval = 1
num_workers = 8
