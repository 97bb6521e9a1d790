"""What both trainings of NOVA's guide share on top of `_base_/train.py`: latents from records, Phi-2, the optimizer, a slow EMA."""

_base_ = "train.py"

dataset = dict(type="RecordVideoTextDataset", short_text_prob=0.5)
grad_checkpoint = "mlp"
text_encoder = dict(type="hf", from_pretrained="microsoft/phi-2", model_max_length=256, dtype="bf16")
scheduler = dict(type="nova", loss_repeat=4)

seed = 1337
log_every = 20
ckpt_every = 5000
lr = 1e-4
adam_betas = (0.9, 0.95)
weight_decay = 0.02
ema_every = 100
ema_device = "cpu"
