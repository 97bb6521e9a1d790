"""Train DiT-XL/2 on images with classes, 256x256, with SpeeD's timesteps and weights (Wang et al. 2025), otherwise as 1x256x256-class.py does.

    torchrun --standalone --nproc_per_node 8 scripts/train.py configs/dit/train/1x256x256-class-speed.py \
        --data-path imagenet/train

Timesteps from 700 on, which teach least, are drawn five times less often. SpeeDiT, its first form, is
`--scheduler.timestep_sampling speedit --scheduler.loss_weighting p2`.
It changes which timesteps are trained, not the model: sample with configs/dit/inference/1x256x256-class.py.

Weights: random.
Hardware: 8 GPUs.
"""

_base_ = ["1x256x256-class.py"]

scheduler = dict(
    timestep_sampling=dict(type="speed", k=5.0, tau=700),
    loss_weighting=dict(type="speed", lam=0.6, tau=700),
)
