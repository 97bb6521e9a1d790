"""Fine-tune STDiT-XL/2 on 16 frames of 256x256 as a rectified flow with uniform times, for one epoch.

Open-Sora 1.2's file of this name has no SpeeDiT in it; `--scheduler.timestep_sampling speedit` adds it.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/opensora/train/16x256x256-spee-rflow.py \
        --data-path clips.csv --ckpt-path WEIGHTS

Sample with configs/opensora/inference/16x256x256-rflow.py.

Weights: from configs/opensora/train/16x512x512.py, or any of STDiT-XL/2.
Hardware: 8 GPUs, 26 GiB each.
"""

_base_ = ["16x256x256.py"]

scheduler = dict(_delete_=True, type="rflow")

epochs = 1
batch_size = 16
