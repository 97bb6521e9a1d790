from opensora.models import dit, image_encoder, latte, nova, pixart, stdit, text_encoder, vae, wan
