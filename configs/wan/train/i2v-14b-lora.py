"""Fine-tune a LoRA of Wan 2.1's image-to-video 14B on a folder of clips, whose first frames are the images.

    python -m tools.finetune FOLDER --model configs/wan/train/i2v-14b-lora.py
    python scripts/train.py configs/wan/train/i2v-14b-lora.py --data-path FOLDER

Not measured: 2.1 B more weights than T2V 14B, which takes 9.67 s and 75.1 GiB a step at 81x480x832 on one H200.

Weights: hub: Wan-AI/Wan2.1-I2V-14B-480P-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_lora.py"

model = dict(type="Wan2.1-I2V-14B", from_pretrained="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers")
image_encoder = dict(type="clip-vision", from_pretrained="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", dtype="bf16")
mask_ratios = {"image_head": 1.0}  # every clip is given its first frame
bucket_config = {  # clips only: an image is all first frame
    "_delete_": True,
    "480x832,544x704,624x624,704x544,832x480": {81: (1.0, 1), 49: (1.0, 1), 33: (1.0, 1), 17: (1.0, 1)},
}
