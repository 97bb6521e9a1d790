"""Train NOVA-d48w1024 on pictures of 1024x1024 from their latents, with the settings of NOVA's training guide.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/nova/train/1x1024x1024.py --data-path RECORDS

RECORDS is a folder of latents with captions; docs/nova.md shows how to write one. This model is for pictures alone: what videos
start from is configs/nova/train/1x512x512.py.
"""

# Define sampling size
num_frames = 1
image_size = (1024, 1024)

# Define dataset
data_path = None  # --data-path
dataset = dict(type="RecordVideoTextDataset", short_text_prob=0.5)
num_workers = 4

# Define acceleration
dtype = "bf16"
grad_checkpoint = "mlp"
plugin = "ddp"

# Define model
model = dict(
    type="NOVA-d48w1024",
    motion=False,
    trained="image",
    from_pretrained=None,  # --ckpt-path
)
vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sdxl-vae")
text_encoder = dict(type="hf", from_pretrained="microsoft/phi-2", model_max_length=256, dtype="bf16")
scheduler = dict(type="nova", loss_repeat=4)

# Others
seed = 1337
outputs = "outputs"
epochs = 1000
max_steps = 30_000
log_every = 20
ckpt_every = 5000
batch_size = 8
lr = 1e-4
adam_betas = (0.9, 0.95)
weight_decay = 0.02
grad_clip = 1.0
ema_decay = 0.98 ** (1 / 100)  # 0.98 once in 100 steps
ema_every = 100
ema_device = "cpu"
