"""Sample videos or images of any size with STDiT2-XL/2, with the settings of Open-Sora 1.1.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora-v1-1/inference/sample.py \
        --ckpt-path hpcai-tech/OpenSora-STDiT-v2-stage3 --prompt-path assets/texts/t2v_samples.txt

Size and length are free: `--num-frames 64 --image-size 480 848`, or `--num-frames 1 --image-size 512 512` for an image;
height and width are multiples of 8. Weights trained by configs/opensora-v1-1/train were conditioned on the clip's frame rate: sample from them with `--fps 8 --frame-interval 1 --model.norm_order norm_then_rope`.
Reference images and videos: `--image first.png`, `--extend clip.mp4`; see docs/how-to/conditioning.md.

Weights: hub: hpcai-tech/OpenSora-STDiT-v2-stage3.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/stdit2.py"]
num_frames = 16
fps = 24
frame_interval = 3  # saved with 24 / 3 frames a second
image_size = (240, 424)

model = dict(
    norm_order="rope_then_norm",  # as the released weights were trained
    from_pretrained="PRETRAINED_MODEL",  # --ckpt-path
)
scheduler = dict(
    type="iddpm",
    num_sampling_steps=100,
    cfg_scale=7.0,
    cfg_channel=3,  # as the released weights were sampled; None guides all channels
)
dtype = "bf16"

batch_size = 1
