"""Train STDiT3-XL/2 in the buckets of stage1.py with stored text features: the clips are read, the captions are not encoded.

    torchrun --standalone --nproc_per_node 8 -m tools.cache_features configs/opensora-v1-2/misc/feat.py \
        --what text --data-path clips.csv
    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/misc/feat.py \
        --data-path clips.csv --ckpt-path ADAPTED

Weights: from configs/opensora-v1-2/train/adapt.py.
Hardware: 8 GPUs of 80 GB.
"""

_base_ = "../train/stage1.py"

text_encoder = dict(
    _delete_=True,
    type="cached",
    cache_dir="outputs/opensora-v1-2/features",
    encoder=dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", model_max_length=300, clean="legacy"),
)

# frames given at random, so that the model learns to continue and to fill in; the rest, 50 %, get none
mask_ratios = {
    "_delete_": True,
    "random": 0.2,
    "interpolate": 0.01,
    "quarter_random": 0.01,
    "quarter_head": 0.01,
    "quarter_tail": 0.01,
    "quarter_head_tail": 0.01,
    "image_random": 0.05,
    "image_head": 0.1,
    "image_tail": 0.05,
    "image_head_tail": 0.05,
}

lr = 2e-4
warmup_steps = 0
