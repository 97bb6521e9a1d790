from opensora.models import dit, latte, nova, pixart, stdit, text_encoder, vae
