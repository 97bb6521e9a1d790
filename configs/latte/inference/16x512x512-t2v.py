"""Sample 16 frames of 512x512 from captions with LatteT2V and its released weights (Ma et al. 2024).

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/latte/inference/16x512x512-t2v.py \
        --ckpt-path maxin-cn/Latte-1 --prompt-path assets/texts/t2v_samples.txt

The settings are Latte's: 50 steps of DDIM. Another source of the weights is a folder or file on disk.
"""

# Define sampling size
num_frames = 16
fps = 24 // 3  # the model was trained on every 3rd frame
image_size = (512, 512)

# Define model
model = dict(
    type="LatteT2V-XL/2",
    space_scale=1.0,
    time_scale=1.0,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
    micro_batch_size=128,
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=120,
    clean="legacy",  # as Latte's pipeline cleans prompts
)
scheduler = dict(
    type="iddpm",
    sampler="ddim",
    num_sampling_steps=50,
    cfg_scale=7.5,
    cfg_channel=None,  # all channels are guided
)
dtype = "fp16"

# Others
batch_size = 1
seed = 42
prompt_path = "./assets/texts/t2v_samples.txt"
save_dir = "./samples"
