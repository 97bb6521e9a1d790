"""T5-XXL's encoder, captions cleaned as PixArt's and Open-Sora's were in training."""

text_encoder = dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", model_max_length=120, clean="legacy")
