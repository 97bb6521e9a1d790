from opensora.acceleration import engine
