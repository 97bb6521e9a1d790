"""Sample videos or images of any size with STDiT2-XL/2, with the settings of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora-v1-1/inference/sample.py \
        --ckpt-path hpcai-tech/OpenSora-STDiT-v2-stage3 --prompt-path assets/texts/t2v_samples.txt

Size and length are free: `--num-frames 64 --image-size 480 848`, or `--num-frames 1 --image-size 512 512` for an image;
height and width are multiples of 8. Weights trained by configs/opensora-v1-1/train were told the rate of the clip, so
sample from them with `--fps 8 --frame-interval 1 --model.norm_order norm_then_rope`.
Pictures and videos to start from: `--image first.png`, `--extend clip.mp4`; see docs/inference.md.
"""

# Define sampling size
num_frames = 16
fps = 24
frame_interval = 3  # saved with 24 / 3 frames a second
image_size = (240, 424)

# Define model
model = dict(
    type="STDiT2-XL/2",
    input_sq_size=512,  # pixels of the square at which positions count patches
    qk_norm=True,
    norm_order="rope_then_norm",  # as the released weights were trained
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
    micro_batch_size=4,
)
text_encoder = dict(
    type="t5",
    from_pretrained="DeepFloyd/t5-v1_1-xxl",
    model_max_length=200,
    clean="legacy",  # as Open-Sora's captions were in training
)
scheduler = dict(
    type="iddpm",
    num_sampling_steps=100,
    cfg_scale=7.0,
    cfg_channel=3,  # as the released weights were sampled; None guides all channels
)
dtype = "bf16"

# Others
batch_size = 1
seed = 42
prompt_path = "./assets/texts/t2v_samples.txt"
save_dir = "./samples"
