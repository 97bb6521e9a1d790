"""Fine-tune the small shipped STDiT on a folder of a few clips: minutes on a CPU, to see each step before a large model.

python -m tools.finetune FOLDER
python scripts/train.py configs/finetune/small.py --data-path FOLDER

Eight frames of 96x160, every third of the video's. After these steps samples show the layout and colours of clips that the model
did not know, and little detail: it is for seeing how all is done, not for quality.

Weights: assets/models/stdit-quickstart.
Hardware: 2 CPU cores, or any GPU.
"""

_base_ = "../quickstart/train.py"

dataset = dict(_delete_=True, type="VideoTextDataset", short_clips="drop")  # a folder or a table, --data-path

outputs = "outputs"
epochs = 1000000
max_steps = 720
log_every = 20
ckpt_every = 240
keep_last_n = 2

batch_size = 2
lr = 8e-4
lr_schedule = "cosine"
adam_betas = (0.9, 0.99)
ema_decay = 0.97

# of the samples
val_scheduler = dict(
    type="iddpm", prediction="v", variance="fixed_small", sampler="ddim", num_sampling_steps=20, cfg_scale=1.0
)
