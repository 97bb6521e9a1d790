"""Sample images of 256x256 from captions with PixArt-XL/2 and its released weights (Chen et al. 2023).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x256x256.py \
        --ckpt-path PixArt-XL-2-256x256.pth --prompt-path assets/texts/t2i_samples.txt

20 steps of DPM-Solver, as PixArt samples; `--scheduler.type iddpm --num-sampling-steps 100` is its other way.

Weights: released by PixArt's authors.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/sd_vae.py", "../../_base_/t5.py"]
num_frames = 1
fps = 1  # an image; the model takes no frame rate
image_size = (256, 256)

model = dict(
    type="PixArt-XL/2",
    space_scale=1.0,
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

prompt_path = "./assets/texts/t2i_samples.txt"
