"""Sample from the NOVA that `make quickstart-nova` trains; `--num-frames 1` makes images.

python scripts/inference.py configs/quickstart/inference_nova.py --ckpt-path CHECKPOINT --prompt "a white dog on the floor"

Weights: from configs/quickstart/nova.py.
Hardware: 2 CPU cores.
"""

_base_ = ["inference.py"]

model = dict(
    _delete_=True, type="NOVA", width=192, num_heads=3, video_depth=2, image_depth=4, head_depth=3, motion=False
)
scheduler = dict(
    _delete_=True,
    type="nova",
    num_sampling_steps=4,
    num_diffusion_steps=20,
    cfg_scale=1.0,
    temperature=0.3,  # at 1 patches of other clips get in
    shift=3.0,
)
batch_size = 21
