"""Train both parts of Open-Sora 1.2's video VAE, 17 frames of 256x256: its second stage.

    torchrun --standalone --nproc_per_node 8 scripts/train_vae.py configs/vae/train/stage2.py --data-path clips.csv \
        --ckpt-path outputs/vae_stage1/RUN/vae

Weights: from configs/vae/train/stage1.py.
Hardware: 8 GPUs of 80 GB.
"""

_base_ = "stage1.py"

vae = dict(freeze_vae_2d=False)

outputs = "outputs/vae_stage2"
