from opensora.models import dit, latte, pixart, stdit, text_encoder, vae
