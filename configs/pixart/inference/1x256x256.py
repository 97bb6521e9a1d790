"""Sample images of 256x256 from captions with PixArt-XL/2 and its released weights (Chen et al. 2023).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/pixart/inference/1x256x256.py \
        --ckpt-path PixArt-XL-2-256x256.pth --prompt-path assets/texts/t2i_samples.txt

20 steps of DPM-Solver, as PixArt samples; `--scheduler.type iddpm --num-sampling-steps 100` is its other way.
"""

# Define sampling size
num_frames = 1
fps = 1  # a picture; the model is not told
image_size = (256, 256)

# Define model
model = dict(
    type="PixArt-XL/2",
    space_scale=1.0,
    no_temporal_pos_emb=True,  # a picture has no time
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=120,
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
batch_size = 2
seed = 42
prompt_path = "./assets/texts/t2i_samples.txt"
save_dir = "./samples"
