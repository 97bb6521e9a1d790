"""What Wan 2.1 and 2.2's A14B train and sample with: VAE, UMT5-XXL, flow matching. By the authors' code they are the same in all of these
pipelines (not compared file by file), so that one download serves them all; a local folder: `--vae.from_pretrained DIR --text_encoder.from_pretrained DIR`."""

vae = dict(
    type="DiffusersVideoVAE", from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", subfolder="vae", posterior="mode"
)
text_encoder = dict(
    type="t5",
    from_pretrained="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    subfolder="text_encoder",
    model_max_length=512,
    clean="basic",
    padding="longest",
    dtype="bf16",
    between_uses="cpu",
)
scheduler = dict(
    type="rflow",
    shift=3.0,  # 480p; 720p: 5.0
    sampler="unipc",
    num_sampling_steps=50,
    cfg_scale=5.0,
)
