"""Train STDiT3-XL/2 on stored features, 51 frames of 240p: Open-Sora 1.2's stage 1 without VAE and T5 in the loop.

The features of the clips and captions are made once. Here a cache holds clips of one length and size, whereas Open-Sora 1.2
stores whole batches of its buckets; another size is another cache.

    torchrun --standalone --nproc_per_node 8 -m tools.cache_features configs/opensora-v1-2/train/stage1_feat.py \
        --what moments text --data-path clips.csv
    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora-v1-2/train/stage1_feat.py \
        --data-path clips.csv --ckpt-path ADAPTED

Weights: from adapt.py.
Hardware: 8 GPUs.
"""

_base_ = ["../../_base_/train.py", "../../_base_/stdit3.py"]
num_frames = 51
frame_interval = 1
image_size = (240, 424)

dataset = dict(type="CachedVideoTextDataset", cache_dir="outputs/opensora-v1-2/features")

model = dict(freeze_y_embedder=True)
text_encoder = dict(
    _delete_=True,
    type="cached",
    cache_dir="outputs/opensora-v1-2/features",
    encoder=dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", model_max_length=300, clean="legacy"),
)
scheduler = dict(
    type="rflow",
    shift="resolution",
    timestep_sampling="logit-normal",
)

# frames given at random, so that the model learns to continue and to fill in; the rest, 50 %, get none
mask_ratios = {
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

ckpt_every = 500
lr = 2e-4
adam_eps = 1e-15
ema_decay = 0.99
