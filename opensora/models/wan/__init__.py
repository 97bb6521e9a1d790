from opensora.models.wan.wan import Wan
from opensora.registry import MODELS

_1B = {"hidden_size": 1536, "depth": 30, "num_heads": 12, "ffn_dim": 8960}
_CLIP = {"condition_channels": 20, "image_dim": 1280}
MODELS.register_variant("Wan2.1-T2V-1.3B", Wan, **_1B)
MODELS.register_variant("Wan2.1-T2V-14B", Wan)
MODELS.register_variant("Wan2.1-I2V-14B", Wan, **_CLIP)
MODELS.register_variant("Wan2.1-FLF2V-14B", Wan, **_CLIP, pos_embed_seq_len=514)
MODELS.register_variant("Wan2.2-T2V-A14B", Wan, boundary=0.875)
MODELS.register_variant("Wan2.2-I2V-A14B", Wan, condition_channels=20, boundary=0.9)
MODELS.register_variant("Wan2.2-TI2V-5B", Wan, in_channels=48, hidden_size=3072, depth=30, num_heads=24, ffn_dim=14336)
