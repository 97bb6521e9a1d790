"""Sample from the small Wan that the repository ships, or from the one that `make quickstart-wan` trains (--ckpt-path).

python scripts/inference.py configs/quickstart/inference_wan.py --prompt "a white dog on the floor"

Weights: assets/models/wan-quickstart.
Hardware: 2 CPU cores.
"""

_base_ = ["inference.py"]

num_frames = 9
fps = 12

model = dict(
    _delete_=True,
    type="Wan",
    hidden_size=256,
    depth=4,
    num_heads=4,
    ffn_dim=768,
    class_dropout_prob=0.0,
    from_pretrained="assets/models/wan-quickstart",
)
vae = dict(_delete_=True, type="DiffusersVideoVAE", from_pretrained="assets/models/vae-video-small")
scheduler = dict(_delete_=True, type="rflow", sampler="unipc", num_sampling_steps=12, cfg_scale=1.0, shift=12.0)
batch_size = 7
