from opensora.models.dit.dit import DiT
