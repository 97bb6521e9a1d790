"""Train both parts of Open-Sora 1.2's video VAE on clips of any length up to 33 frames of 256x256: its third stage.

    torchrun --standalone --nproc_per_node 8 scripts/train_vae.py configs/vae/train/stage3.py --data-path clips.csv \
        --ckpt-path outputs/vae_stage2/RUN/vae

Weights: from configs/vae/train/stage2.py.
Hardware: 8 GPUs of 80 GB.
"""

_base_ = "stage2.py"
num_frames = 33
mixed_lengths = list(range(1, 34))

outputs = "outputs/vae_stage3"
