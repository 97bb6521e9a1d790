"""Fine-tune a LoRA of Wan 2.2's TI2V 5B, from text and from images, on a folder of clips, at 704p and up to 121 frames.

    python -m tools.finetune FOLDER --model configs/wan/train/ti2v-5b-lora.py
    python scripts/train.py configs/wan/train/ti2v-5b-lora.py --data-path FOLDER

At 81x480x832 with grad_checkpoint="selective" a step takes 0.49 s and 46.4 GiB, VAE and text encoder apart
(random weights of full size, 81x480x832, one H200, `python -m tools.benchmark wan`); at 121x704x1280 it was not measured. On a card of 16 or 24 GB:
--grad-checkpoint attention --weight-streaming 3 --activation-offload True (0.60 s, 4.7 GiB).

Weights: hub: Wan-AI/Wan2.2-TI2V-5B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_lora.py"

model = dict(type="Wan2.2-TI2V-5B", from_pretrained="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
vae = dict(from_pretrained="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
text_encoder = dict(from_pretrained="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
scheduler = dict(shift=5.0)

dataset = dict(target_fps=24)
bucket_config = {
    "_delete_": True,
    "704x1280,832x1088,960x960,1088x832,1280x704": {
        121: (1.0, 1), 81: (1.0, 1), 49: (1.0, 1), 17: (1.0, 1), 1: (1.0, 4),
    },
}  # fmt: skip
mask_ratios = {"image_head": 0.5}  # half of the clips are given their first frame

val_num_frames = 121
val_image_size = (704, 1280)
val_fps = 24
