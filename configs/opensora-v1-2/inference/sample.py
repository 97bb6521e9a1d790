"""Sample videos or images of any size with STDiT3-XL/2 and the video VAE, with the settings of Open-Sora 1.2.

    torchrun --standalone --nproc_per_node 1 scripts/inference.py configs/opensora-v1-2/inference/sample.py \
        --ckpt-path hpcai-tech/OpenSora-STDiT-v3 --prompt-path assets/texts/t2v_samples.txt

`--num-frames 4s`, or a number, 1 for an image; `--resolution 720p --aspect-ratio 9:16`, height:width, is 720x1280. Where
decoding runs out of memory, add `--vae.tile_size 512`. The released weights know captions that end in "aesthetic score: 6.5.",
which `--aes 6.5` adds. Reference images and videos: `--image first.png`, `--extend clip.mp4`; see docs/how-to/conditioning.md.

Weights: hub: hpcai-tech/OpenSora-STDiT-v3.
Hardware: 1 GPU.
"""

_base_ = ["../../_base_/sample.py", "../../_base_/stdit3.py"]
num_frames = 51
fps = 24
frame_interval = 1
image_size = (240, 424)

model = dict(from_pretrained="PRETRAINED_MODEL")  # --ckpt-path
scheduler = dict(
    type="rflow",
    shift="resolution",
    num_sampling_steps=30,
    cfg_scale=7.0,
)
dtype = "bf16"

batch_size = 1
