"""Sample images of about 1024x1024 pixels with PixArt-Sigma-XL/2 and its released weights (Chen et al. 2024).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x1024-sigma.py \
        --ckpt-path PixArt-Sigma-XL-2-1024-MS.pth --prompt-path assets/texts/t2i_samples.txt

Captions have up to 300 tokens, and the VAE is that of SDXL. `--image-size 768 1344` is a wide picture.
20 steps of DPM-Solver, as PixArt samples; `--scheduler.type iddpm --num-sampling-steps 100` is its other way.
"""

# Define sampling size
num_frames = 1
fps = 1  # a picture; the model is not told
image_size = (1024, 1024)

# Define model
model = dict(
    type="PixArt-Sigma-XL/2",
    space_scale=2.0,  # new / old height: the base model is 512x512
    no_temporal_pos_emb=True,  # a picture has no time
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
    subfolder="vae",
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=300,
    clean="legacy",  # as PixArt's captions were in training
)
scheduler = dict(
    type="dpm-solver",  # DPM-Solver++, second order, multistep
    num_sampling_steps=20,
    cfg_scale=4.5,
    cfg_channel=None,  # all channels are guided
)
dtype = "fp16"

# Others
batch_size = 1
seed = 42
prompt_path = "./assets/texts/t2i_samples.txt"
save_dir = "./samples"
