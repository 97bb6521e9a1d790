"""Sample images of 256x256 from captions with DiT-XL/2, trained by configs/dit/train/1x256x256.py.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/dit/inference/1x256x256.py \
        --ckpt-path WEIGHTS --prompt-path assets/texts/t2i_samples.txt

No such weights were released. As in Open-Sora, 20 steps of DPM-Solver; `--scheduler.type iddpm --num-sampling-steps 100`
takes longer.
"""

# Define sampling size
num_frames = 1
fps = 1  # a picture; the model is not told
image_size = (256, 256)

# Define model
model = dict(
    type="DiT-XL/2",
    condition="text",
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
    type="clip",
    from_pretrained="openai/clip-vit-base-patch32",
    model_max_length=77,
)
scheduler = dict(
    type="dpm-solver",  # DPM-Solver++, second order, multistep
    num_sampling_steps=20,
    cfg_scale=4.0,
    cfg_channel=None,  # all channels are guided
)
dtype = "fp16"

# Others
batch_size = 2
seed = 42
prompt_path = "./assets/texts/t2i_samples.txt"
save_dir = "./samples"
