from opensora.models import stdit, text_encoder, vae
