"""Settings that trainings of denoisers share: where data and runs are, precision, engine, logging."""

# Data
root = None
data_path = None  # --data-path
num_workers = 4
use_image_transform = False

# Acceleration
dtype = "bf16"
grad_checkpoint = "block"
plugin = "ddp"
sp_size = 1

# Run
seed = 42
outputs = "outputs"
wandb = False
epochs = 1000  # just large enough, stop when satisfied
log_every = 10
ckpt_every = 1000
load = None
grad_clip = 1.0
