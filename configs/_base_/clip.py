"""CLIP's text encoder: one pooled vector."""

text_encoder = dict(type="clip", from_pretrained="openai/clip-vit-base-patch32", model_max_length=77)
