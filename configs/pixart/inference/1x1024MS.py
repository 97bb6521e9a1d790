"""Sample images of about 1024x1024 pixels from captions with PixArtMS-XL/2 and its released weights (Chen et al. 2023).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x1024MS.py \
        --ckpt-path PixArt-XL-2-1024-MS.pth --prompt-path assets/texts/t2i_samples.txt

The model is conditioned on height and width: `--image-size 768 1344` is a wide image.
20 steps of DPM-Solver, as PixArt samples; `--scheduler.type iddpm --num-sampling-steps 100` is its other way.

Weights: released by PixArt's authors.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 1
fps = 1  # an image; the model takes no frame rate
image_size = (1024, 1024)

model = dict(
    type="PixArtMS-XL/2",
    space_scale=2.0,  # new / old height: the base model is 512x512
    base_size=64,  # 1024 pixels in patches of 16; other sizes see the same range of positions
    no_temporal_pos_emb=True,  # an image has no time
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
scheduler = dict(
    type="dpm-solver",  # DPM-Solver++, second order, multistep
    num_sampling_steps=20,
    cfg_scale=4.5,
    cfg_channel=None,  # all channels are guided
)

batch_size = 1
prompt_path = "./assets/texts/t2i_samples.txt"
