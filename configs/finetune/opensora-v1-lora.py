"""Fine-tune a LoRA of STDiT-XL/2, Open-Sora 1.0's released model, on a folder of a few clips: 16 frames of 256x256, every third.

    python -m tools.finetune FOLDER --model opensora-v1-lora
    python scripts/train.py configs/finetune/opensora-v1-lora.py --data-path FOLDER

Clips have one size and length, so their latents can be stored once. It needs peft: `pip install -e '.[lora]'`.

Weights: hub: OpenSora-v1-HQ-16x256x256.pth of hpcai-tech/Open-Sora.
Hardware: 1 GPU, 23 GiB.
"""

_base_ = "../opensora/train/16x256x256.py"

dataset = dict(type="VideoTextDataset", short_clips="drop")  # a folder or a table, --data-path
model = dict(from_pretrained="OpenSora-v1-HQ-16x256x256.pth")
lora = dict(rank=16, alpha=16)
cache_text = True

epochs = 1000000
max_steps = 1000
ckpt_every = 200
keep_last_n = 2

batch_size = 4
lr = 1e-4
warmup_steps = 50
ema_decay = 0.99

# of the samples
val_scheduler = dict(type="iddpm", num_sampling_steps=100, cfg_scale=7.0, cfg_channel=3)
