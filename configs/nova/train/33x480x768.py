"""Train NOVA's video model on 33 frames of 480x768 from their latents, with the settings of NOVA's training guide.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/nova/train/33x480x768.py --data-path RECORDS \
        --ckpt-path IMAGE_MODEL

RECORDS is a folder of latents with captions and a motion score (flow); docs/nova.md shows how to write one. IMAGE_MODEL is a
checkpoint of configs/nova/train/1x512x512.py: the published video model began from an image model. Its VAE is in no package that
we use; Wan 2.1's has the same strides and 16 channels.
"""

# Define sampling size
num_frames = 33
image_size = (480, 768)

# Define dataset
data_path = None  # --data-path
dataset = dict(type="RecordVideoTextDataset", short_text_prob=0.5, fps=12.0)
num_workers = 4

# Define acceleration
dtype = "bf16"
grad_checkpoint = "mlp"
plugin = "ddp"

# Define model
model = dict(
    type="NOVA-d48w1024-T2V",
    base_size=(16, 60, 96),
    from_pretrained=None,  # --ckpt-path
)
vae = dict(type="DiffusersVideoVAE", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", subfolder="vae")
text_encoder = dict(type="hf", from_pretrained="microsoft/phi-2", model_max_length=256, dtype="bf16")
scheduler = dict(type="nova", loss_repeat=4)

# Others
seed = 1337
outputs = "outputs"
epochs = 1000
max_steps = 60_000
log_every = 20
ckpt_every = 5000
batch_size = 3
lr = 1e-4
adam_betas = (0.9, 0.95)
weight_decay = 0.02
grad_clip = 1.0
ema_decay = 0.97 ** (1 / 100)  # 0.97 once in 100 steps
ema_every = 100
ema_device = "cpu"
