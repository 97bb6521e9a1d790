"""Sample videos or images of any size with STDiT3-XL/2 and the video VAE, with the settings of Open-Sora 1.2.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora-v1-2/inference/sample.py \
        --ckpt-path hpcai-tech/OpenSora-STDiT-v3 --prompt-path assets/texts/t2v_samples.txt

`--num-frames 4s`, or a number, 1 for an image; `--resolution 720p --aspect-ratio 9:16`, height:width, is 720x1280. Where
decoding runs out of memory, add `--vae.tile_size 512`. The released weights know captions that end in "aesthetic score: 6.5.",
which `--aes 6.5` adds. Pictures and videos to start from: `--image first.png`, `--extend clip.mp4`; see docs/inference.md.
"""

# Define sampling size
num_frames = 51
fps = 24
frame_interval = 1
image_size = (240, 424)

# Define model
model = dict(
    type="STDiT3-XL/2",
    qk_norm=True,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
vae = dict(
    type="OpenSoraVAE_V1_2",
    from_pretrained="hpcai-tech/OpenSora-VAE-v1.2",
    micro_frame_size=17,
    micro_batch_size=4,
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=300,
    clean="legacy",  # as Open-Sora's captions were in training
)
scheduler = dict(
    type="rflow",
    shift="resolution",
    num_sampling_steps=30,
    cfg_scale=7.0,
)
dtype = "bf16"

# Others
batch_size = 1
seed = 42
prompt_path = "./assets/texts/t2v_samples.txt"
save_dir = "./samples"
