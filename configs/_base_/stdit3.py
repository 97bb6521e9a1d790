"""What Open-Sora 1.2 trains and samples with: STDiT3, its video VAE, T5-XXL with 300 tokens."""

model = dict(
    type="STDiT3-XL/2",
    input_sq_size=512,  # pixels of the square at which positions count patches
    qk_norm=True,
    from_pretrained=None,  # --ckpt-path
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="OpenSoraVAE_V1_2",
    from_pretrained="hpcai-tech/OpenSora-VAE-v1.2",
    micro_frame_size=17,
    micro_batch_size=4,
)
text_encoder = dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", model_max_length=300, clean="legacy")
