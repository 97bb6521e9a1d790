"""Reconstruct videos with a video VAE: the small one that is shipped (configs/vae/train/video-small.py trained it), or any of
diffusers' (--ckpt-path, --vae.subfolder vae).

    python scripts/inference_vae.py configs/vae/inference/video.py --files assets/clips/white_dog.mp4
    python scripts/inference_vae.py configs/vae/inference/video.py --data-path clips.csv --num-frames 33 \
        --ckpt-path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --vae.subfolder vae

Weights: assets/models/vae-video-small.
Hardware: 1 GPU, or a CPU.
"""

vae = dict(type="DiffusersVideoVAE", from_pretrained="assets/models/vae-video-small")
dtype = "fp32"
save_dir = "./samples/vae"
