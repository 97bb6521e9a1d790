"""Fine-tune a LoRA of one expert of Wan 2.2's T2V A14B on a folder of clips, at 480p and up to 81 frames.

    python scripts/train.py configs/wan/train/t2v-a14b-lora.py --data-path FOLDER
    python scripts/train.py configs/wan/train/t2v-a14b-lora.py --data-path FOLDER --model.expert low

The high-noise expert learns layout and motion, the low-noise one looks; each run makes one adapter. The times of the
expert that is trained, from or up to 0.875, are filled in. docs/how-to/wan.md: sampling with both.

Each expert is the network of T2V 14B: a step takes 9.67 s and 75.1 GiB, VAE and text encoder apart
(random weights of full size, 81x480x832, one H200, `python -m tools.benchmark wan`).

Weights: hub: Wan-AI/Wan2.2-T2V-A14B-Diffusers.
Hardware: 1 GPU.
"""

_base_ = "../../_base_/wan_lora.py"

model = dict(type="Wan2.2-T2V-A14B", from_pretrained="Wan-AI/Wan2.2-T2V-A14B-Diffusers", expert="high")
scheduler = dict(shift=5.0)  # of the training, as in DiffSynth-Studio; sampling shifts by 12
