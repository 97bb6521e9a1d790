"""Train NOVA-d48w1024 on images of 1024x1024 from their latents, with the settings of NOVA's training guide.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/nova/train/1x1024x1024.py --data-path RECORDS

RECORDS is a folder of latents with captions; docs/how-to/nova.md shows how to write one. This model is for images alone: what videos
start from is configs/nova/train/1x512x512.py.

Weights: random.
Hardware: 8 GPUs.
"""

_base_ = "../../_base_/nova.py"
num_frames = 1
image_size = (1024, 1024)

model = dict(
    type="NOVA-d48w1024",
    motion=False,
    trained="image",
    from_pretrained=None,  # --ckpt-path
)
vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sdxl-vae")

max_steps = 30_000
batch_size = 8
ema_decay = 0.98 ** (1 / 100)  # 0.98 once in 100 steps
