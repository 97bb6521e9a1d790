"""Train NOVA's video model on 33 frames of 480x768 from their latents, with the settings of NOVA's training guide.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/nova/train/33x480x768.py --data-path RECORDS \
        --ckpt-path IMAGE_MODEL

RECORDS is a folder of latents with captions and a motion score (flow); docs/how-to/nova.md shows how to write one. IMAGE_MODEL is a
checkpoint of configs/nova/train/1x512x512.py: the published video model began from an image model. Its VAE is in no package that
we use; Wan 2.1's has the same strides and 16 channels.

Weights: from configs/nova/train/1x512x512.py.
Hardware: 8 GPUs.
"""

_base_ = "../../_base_/nova.py"
num_frames = 33
image_size = (480, 768)

dataset = dict(fps=12.0)

model = dict(
    type="NOVA-d48w1024-T2V",
    base_size=(16, 60, 96),
    from_pretrained=None,  # --ckpt-path
)
vae = dict(type="DiffusersVideoVAE", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", subfolder="vae")

max_steps = 60_000
batch_size = 3
ema_decay = 0.97 ** (1 / 100)  # 0.97 once in 100 steps
