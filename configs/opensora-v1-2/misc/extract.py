"""Store the VAE's moments of clips, 51 frames of 240p, and T5's features of their captions; train from them with stage1_feat.py.

    torchrun --standalone --nproc_per_node 8 -m tools.cache_features configs/opensora-v1-2/misc/extract.py \
        --what moments text --data-path clips.csv

Weights: hub: hpcai-tech/OpenSora-VAE-v1.2.
Hardware: 8 GPUs.
"""

_base_ = "../train/stage1_feat.py"

vae = dict(micro_batch_size=32)
