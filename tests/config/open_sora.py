"""What the 112 config files of Open-Sora 1.0, 1.1 and 1.2 set: keys and values, by release and name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opensora.config.load import InferenceConfig, TrainConfig, VAEInferenceConfig, VAETrainConfig
from opensora.config.schema import Schema
from opensora.registry import DATASETS, MODELS, SCHEDULERS

Facts = dict[str, Any]

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}
COMPONENTS["discriminator"] = MODELS

RELEASES = ("1.0", "1.1", "1.2")
SD = {"type": "VideoAutoencoderKL", "from_pretrained": "stabilityai/sd-vae-ft-ema"}
SDXL = {
    "type": "VideoAutoencoderKL",
    "from_pretrained": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
    "subfolder": "vae",
}
V12 = {
    "type": "OpenSoraVAE_V1_2",
    "from_pretrained": "pretrained_models/vae-pipeline",
    "micro_frame_size": 17,
    "micro_batch_size": 4,
}
CLIP = {"type": "clip", "from_pretrained": "openai/clip-vit-base-patch32", "model_max_length": 77}
T5_FOLDER, T5_HUB = "./pretrained_models/t5_ckpts", "DeepFloyd/t5-v1_1-xxl"
NONE = {"data_path": None, "num_frames": None, "image_size": (None, None)}
VARIABLE = {"type": "VariableVideoTextDataset", "transform_name": "resize_crop"}
RFLOW = {"type": "rflow", "use_timestep_transform": True, "sample_method": "logit-normal"}
TEXTS = "./assets/texts/"


def t5(release: str, length: int = 120, **more: Any) -> Facts:
    name = T5_FOLDER if release == "1.0" else T5_HUB
    return {"type": "t5", "from_pretrained": name, "model_max_length": length, **more}


def kernels(release: str) -> Facts:
    """The attention switch was renamed in 1.2."""
    return {"enable_flash_attn" if release == "1.2" else "enable_flashattn": True, "enable_layernorm_kernel": True}


def training(
    *, batch: int | None, every: int = 1000, checkpointing: bool = True, lr: float = 2e-5, **more: Any
) -> Facts:
    common = {
        "num_workers": 4, "dtype": "bf16", "grad_checkpoint": checkpointing, "plugin": "zero2", "sp_size": 1, "seed": 42,
        "outputs": "outputs", "wandb": False, "epochs": 1000, "log_every": 10, "ckpt_every": every, "load": None,
        "batch_size": batch, "lr": lr, "grad_clip": 1.0, "scheduler": {"type": "iddpm", "timestep_respacing": ""},
    }  # fmt: skip
    return common | more


def clips(
    release: str, frames: int, interval: int, side: int, transform: str | None = None, path: str | None = None
) -> Facts:
    """Data of one length and size: fields of their own in 1.0, then a component."""
    size = {"num_frames": frames, "frame_interval": interval, "image_size": (side, side)}
    if release == "1.0":
        images = {"use_image_transform": frames == 1}
        return {**size, "root": None, "data_path": "CSV_PATH", **images}
    named = {} if transform is None else {"transform_name": transform}
    return {"dataset": {"type": "VideoTextDataset", "data_path": path, **size, **named}}


def sampling(
    frames: int, fps: int, size: tuple[int, int], steps: int, scale: float, batch: int = 2, **more: Any
) -> Facts:
    scheduler = {"type": more.pop("solver", "dpm-solver"), "num_sampling_steps": steps, "cfg_scale": scale}
    common = {
        "num_frames": frames,
        "fps": fps,
        "image_size": size,
        "batch_size": batch,
        "seed": 42,
        "scheduler": scheduler,
    }
    return {**common, "save_dir": "./samples/samples/", **more}


def families_of_all(release: str) -> Iterator[tuple[str, Facts]]:
    """DiT, Latte, STDiT and PixArt, which each release has."""
    fast, dtype = kernels(release), {"dtype": "fp16" if release == "1.0" else "bf16"}
    late = {} if release == "1.0" else fast  # in sampling
    t5_train, weights = t5(release, shardformer=True), "PRETRAINED_MODEL"
    dit, latte = {"type": "DiT-XL/2"}, {"type": "Latte-XL/2"}
    images = {"no_temporal_pos_emb": True}
    classes = {"text_encoder": {"type": "classes", "num_classes": 1000}, "prompt_path": TEXTS + "imagenet_id.txt"}
    actions = {"text_encoder": {"type": "classes", "num_classes": 101}, "prompt_path": TEXTS + "ucf101_id.txt"}
    text = {"condition": "text", "from_pretrained": weights}
    with_clip = {**dtype, "vae": SD, "text_encoder": CLIP}
    labels = {"prompt_path": TEXTS + "ucf101_labels.txt"}

    yield (
        "dit/inference/16x256x256",
        sampling(16, 8, (256, 256), 20, 4.0, model=dit | text | late, **with_clip, **labels),
    )
    of_class = dit | images | {"condition": "label_1000", "from_pretrained": "DiT-XL-2-256x256.pt"} | late
    yield (
        "dit/inference/1x256x256-class",
        sampling(1, 1, (256, 256), 20, 4.0, model=of_class, **dtype, vae=SD, **classes),
    )
    yield (
        "dit/inference/1x256x256",
        sampling(
            1,
            1,
            (256, 256),
            20,
            4.0,
            model=dit | images | text | late,
            **with_clip,
            prompt_path=TEXTS + "imagenet_labels.txt",
        ),
    )
    begun = dit | {"from_pretrained": "DiT-XL-2-256x256.pt"} | fast
    encoders = {"vae": SD, "text_encoder": CLIP}
    yield (
        "dit/train/16x256x256",
        training(batch=8, checkpointing=False, model=begun, **encoders) | clips(release, 16, 3, 256),
    )
    yield (
        "dit/train/1x256x256",
        training(batch=128, checkpointing=False, lr=1e-4, model=dit | images | fast, **encoders)
        | clips(release, 1, 1, 256, None if release == "1.0" else "center"),
    )
    of_action = latte | {"condition": "label_101", "from_pretrained": "Latte-XL-2-256x256-ucf101.pt"} | late
    yield (
        "latte/inference/16x256x256-class",
        sampling(16, 8, (256, 256), 20, 4.0, model=of_action, **dtype, vae=SD, **actions),
    )
    yield (
        "latte/inference/16x256x256",
        sampling(16, 8, (256, 256), 20, 4.0, model=latte | text | late, **with_clip, **labels),
    )
    yield "latte/train/16x256x256", training(batch=8, model=latte | fast, **encoders) | clips(release, 16, 3, 256)

    for (frames, side, interval), micro in zip(
        ((16, 256, 3), (16, 512, 3), (64, 512, 2)), (None, 128, 128), strict=True
    ):
        model = {"type": "STDiT-XL/2", "space_scale": side / 512, "time_scale": 1.0 if frames == 16 else 2 / 3}
        vae = SD if micro is None else SD | {"micro_batch_size": micro}
        scheduler = {"type": "iddpm", "num_sampling_steps": 100, "cfg_scale": 7.0}
        scheduler |= {"cfg_channel": 3} if release == "1.2" and side == 256 else {}
        name, batch = f"{frames}x{side}x{side}", 1 if frames == 64 else 2
        yield f"opensora/inference/{name}", sampling(
            frames, 24 // interval, (side, side), 0, 0.0, batch, model=model | fast | {"from_pretrained": weights}, **dtype,
            vae=vae, text_encoder=t5(release), prompt_path=TEXTS + "t2v_samples.txt",
        ) | {"scheduler": scheduler}  # fmt: skip
        begun = model | fast | {"from_pretrained": "PixArt-XL-2-512x512.pth" if side == 256 else None}
        vae = vae if frames == 16 else SD | {"micro_batch_size": 64}
        yield f"opensora/train/{name}", training(
            batch=8 if frames == 16 else 4, every={256: 1000, 512: 500 if frames == 16 else 250}[side],
            checkpointing=(frames, side) != (16, 512), model=begun, vae=vae, text_encoder=t5_train,
        ) | clips(release, frames, interval, side)  # fmt: skip
    for name, frames, every in (("64x512x512-sp", 64, 1000), ("360x512x512", 360, 250)):
        model = {"type": "STDiT-XL/2", "space_scale": 1.0, "time_scale": 2 / 3, "from_pretrained": None, **fast}
        yield f"opensora/train/{name}", training(
            batch=1, every=every, plugin="zero2-seq", sp_size=2, model=model | {"enable_sequence_parallelism": True}, vae=SD,
            text_encoder=t5_train,
        ) | clips(release, frames, 128 // frames or 1, 512)  # fmt: skip

    pixart = {"type": "PixArt-XL/2", "time_scale": 1.0}
    own = "outputs/098-F16S3-PixArt-XL-2/epoch7-global_step30000/model_ckpt.pt"
    encoders = {**dtype, "vae": SD, "text_encoder": t5(release)}
    yield "pixart/inference/16x256x256", sampling(
        16, 8, (256, 256), 20, 7.0, model=pixart | {"space_scale": 0.5, "from_pretrained": own}, **encoders,
        prompt_path=TEXTS + "t2v_samples.txt",
    )  # fmt: skip
    for side, file in ((256, "PixArt-XL-2-256x256.pth"), (512, "PixArt-XL-2-512x512.pth")):
        prompts = (
            {"prompt_path": TEXTS + "t2i_samples.txt"}
            if side == 256 or release == "1.0"
            else {"prompt": ["a ship", "a cactus"]}
        )
        model = pixart | images | {"space_scale": 1.0, "from_pretrained": file}
        yield (
            f"pixart/inference/1x{side}x{side}",
            sampling(1, 1, (side, side), 20, 7.0, model=model, **encoders, **prompts),
        )
    model = {
        "type": "PixArtMS-XL/2",
        "space_scale": 2.0,
        "time_scale": 1.0,
        **images,
        "from_pretrained": "PixArt-XL-2-1024-MS.pth",
    }
    yield "pixart/inference/1x1024MS", sampling(
        1, 1, (1920, 512), 20, 7.0, multi_resolution=True if release == "1.0" else "PixArtMS", model=model, **encoders,
        prompt_path=TEXTS + "t2i_samples.txt",
    )  # fmt: skip
    encoders = {"vae": SD, "text_encoder": t5_train}
    for frames, side, interval, batch, every in ((16, 256, 3, 8, 1000), (1, 512, 1, 32, 1000), (64, 512, 2, 4, 250)):
        model = pixart | {"space_scale": side / 512, "from_pretrained": "PixArt-XL-2-512x512.pth", **fast}
        model |= {"time_scale": 2 / 3} if frames == 64 else images if frames == 1 else {}
        yield f"pixart/train/{frames}x{side}x{side}", training(
            batch=batch, every=every, checkpointing=frames != 16, model=model, **encoders
        ) | clips(release, frames, interval, side)  # fmt: skip


MASKS_1_1 = {
    "no": 0.75, "quarter_random": 0.025, "quarter_head": 0.025, "quarter_tail": 0.025, "quarter_head_tail": 0.05,
    "image_random": 0.025, "image_head": 0.025, "image_tail": 0.025, "image_head_tail": 0.05,
}  # fmt: skip
MASKS_1_2 = {
    "random": 0.2, "intepolate": 0.01, "quarter_random": 0.01, "quarter_head": 0.01, "quarter_tail": 0.01,
    "quarter_head_tail": 0.01, "image_random": 0.05, "image_head": 0.1, "image_tail": 0.05, "image_head_tail": 0.05,
}  # fmt: skip
BUCKETS_1_1 = {
    "image": {"256": {1: (1.0, 256)}, "1080p": {1: (1.0, 8)}},
    "video": {"240p": {16: (1.0, 16), 128: (1.0, 2)}, "720p": {16: (0.1, 2), 32: (0.0, None)}, "1024": {1: (0.3, 20)}},
    "stage1": {"144p": {1: (0.5, 48), 96: (1.0, 1)}, "256": {1: (0.5, 24), 64: (0.0, None)}, "512": {1: (0.4, 12)}},
    "stage2": {"256": {1: (0.8, 254), 16: (0.5, 17)}, "480p": {1: (0.4, 54), 32: (0.0, None)}},
    "stage3": {"360p": {1: (0.5, 120), 128: (0.5, 1)}, "720p": {1: (0.4, 40), 96: (0.0, None)}},
    "benchmark": {"720p": {1: (20, 40), 32: (0.5, (2, 4)), 64: (0.5, (1, 1))}},
}
BUCKETS_1_2 = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20)},
    "2048": {1: (0.1, 5)},
}
SEARCHED = {"144p": {1: (475, 0), 408: (6, 0)}, "240p": {1: (297, 200), 51: (20, 0)}, "512": {408: (1, 0)}}
EVALUATED = {"144p": {1: (None, 100), 408: (None, 4)}, "2048": {1: (None, 5)}}
LATE = {"adam_eps": 1e-15, "ema_decay": 0.99}


def opensora_1_1(release: str) -> Iterator[tuple[str, Facts]]:
    """STDiT2, in 1.1 and 1.2; and the masks and SpeeDiT of STDiT."""
    fast, masks = kernels(release), {f"mask_{kind}": ratio for kind, ratio in MASKS_1_1.items()}
    stale = {"mask_head": 0.05, "mask_tail": 0.05, "mask_head_tail": 0.05}
    if release == "1.2":
        masks = {{"no": "identity"}.get(kind, kind): ratio for kind, ratio in MASKS_1_1.items()}
    stdit2 = {"type": "STDiT2-XL/2", "input_sq_size": 512, "qk_norm": True, **fast}
    if release == "1.2":
        stdit2["qk_norm_legacy"] = True
    vae = SD | {"micro_batch_size": 4}
    for name, buckets in BUCKETS_1_1.items():
        batch = 10 if name in ("image", "video") else None
        facts = training(
            batch=batch, every=1000 if name == "benchmark" else 500, checkpointing=name != "stage1", bucket_config=buckets,
            num_bucket_build_workers=16, model=stdit2 | {"from_pretrained": None}, vae=vae | {"local_files_only": True},
            text_encoder=t5(release, 200, shardformer=True, local_files_only=True), dataset=VARIABLE | NONE | {"frame_interval": 3},
            num_workers=8 if name.startswith("stage") else 4,
        )  # fmt: skip
        yield f"opensora-v1-1/train/{name}", facts | ({"mask_ratios": masks} if name.startswith("stage") else {})
    published = stdit2 | {"from_pretrained": "hpcai-tech/OpenSora-STDiT-v2-stage3"}
    sample = sampling(
        16, 24, (240, 426), 100, 7.0, 1, solver="iddpm", frame_interval=3, multi_resolution="STDiT2", model=published, dtype="bf16",
        vae=vae | {"cache_dir": None}, text_encoder=t5(release, 200, cache_dir=None),
    )  # fmt: skip
    sample["scheduler"] = {**sample["scheduler"], "cfg_channel": 3}
    yield "opensora-v1-1/inference/sample", sample | {"prompt_path": TEXTS + "t2v_samples.txt", "prompt": None}
    listed = {
        "reference_path": ["https://example.org/d0.mp4", None, "wave.png"],
        "mask_strategy": ["0,0,0,0,8,0.3", None, "0"],
    }
    own = 'a cliff{"reference_path": "cliff.png", "mask_strategy": "0"}'
    prompts: Facts = {"prompt_path": None, "prompt": ["a car", own, "a hall"], **listed}
    if release == "1.2":
        prompts = {
            "prompt_path": None,
            "prompt": ["a car", own, 'a hall{"reference_path": "wave.png", "mask_strategy": "0"}'],
        }
    yield "opensora-v1-1/inference/sample-ref", sample | prompts | {"loop": 2, "condition_frame_length": 4}
    stdit = {
        "type": "STDiT-XL/2",
        "space_scale": 0.5,
        "time_scale": 1.0,
        "from_pretrained": "PixArt-XL-2-512x512.pth",
        **fast,
    }
    kinds = ("identity", "random") if release == "1.2" else ("mask_no", "mask_random")
    text_encoder = t5(release, shardformer=True)
    for name, kind, ratios in (("mask", "iddpm", (0.7, 0.15)), ("spee", "iddpm-speed", (0.5, 0.35))):
        scheduler = {"type": kind, "timestep_respacing": ""}
        yield f"opensora/train/16x256x256-{name}", training(
            batch=8, model=stdit, mask_ratios=dict(zip(kinds, ratios, strict=True)) | stale, vae=SD, text_encoder=text_encoder
        ) | clips(release, 16, 3, 256) | {"scheduler": scheduler}  # fmt: skip


def only_1_2() -> Iterator[tuple[str, Facts]]:
    """STDiT3, rectified flow for the older models, PixArt-Sigma, the VAE, and the files of tools."""
    fast, release = kernels("1.2"), "1.2"
    rflow, t5_train = {"type": "rflow"}, t5(release, shardformer=True)
    stdit = {"type": "STDiT-XL/2", "space_scale": 1.0, "time_scale": 1.0, **fast, "from_pretrained": "PRETRAINED_MODEL"}
    pixart = {"type": "PixArt-XL/2", "space_scale": 1.0, "time_scale": 1.0, "no_temporal_pos_emb": True}
    yield "opensora/inference/16x512x512-rflow", sampling(
        16, 8, (512, 512), 10, 7.0, solver="rflow", model=stdit, dtype="bf16", vae=SD | {"micro_batch_size": 2},
        text_encoder=t5(release), prompt_path=TEXTS + "t2v_samples.txt",
    )  # fmt: skip
    yield "opensora/train/16x256x256-spee-rflow", training(
        batch=16, model=stdit | {"space_scale": 0.5}, vae=SD, text_encoder=t5_train, wandb=True, epochs=1
    ) | clips(release, 16, 3, 256) | {"scheduler": rflow}  # fmt: skip
    yield "pixart/inference/1x512x512-rflow", sampling(
        1, 1, (512, 512), 20, 7.0, solver="rflow", model=pixart | {"from_pretrained": "PRETRAINED_MODEL"}, dtype="bf16", vae=SD,
        text_encoder=t5(release), prompt=["a ship"],
    )  # fmt: skip
    yield "pixart/train/1x512x512-rflow", training(
        batch=64, model=pixart | fast, vae=SD, text_encoder=t5_train, wandb=True, epochs=2
    ) | clips(release, 1, 3, 512) | {"scheduler": rflow}  # fmt: skip
    for name, kind, weights in (
        ("1x2048MS", "PixArt-XL/2", "PixArt-Sigma-XL-2-2K-MS.pth"),
        ("1x20481B", "PixArt-1B/2", "PixArt-1B-2.pth"),
    ):
        model = {
            "type": kind,
            "from_pretrained": weights,
            "space_scale": 4,
            "no_temporal_pos_emb": True,
            "base_size": 256,
            **fast,
        }
        yield f"pixart/inference/{name}", sampling(
            1, 1, (2560, 1536), 14, 4.5, 1, model=model, dtype="bf16", vae=SDXL, text_encoder=t5(release, 300),
            prompt_path=TEXTS + "t2i_sigma.txt",
        )  # fmt: skip
    large = {
        "type": "PixArt-1B/2",
        "space_scale": 4.0,
        "no_temporal_pos_emb": True,
        "from_pretrained": "PixArt-1B-2.pth",
        **fast,
    }
    yield (
        "pixart/train/1x2048x2048",
        training(batch=4, model=large, vae=SDXL, text_encoder=t5(release, 300))
        | clips(release, 1, 3, 2048, path="images.csv"),
    )
    yield "opensora-v1-1/train/image_rflow", training(
        batch=100, every=500, epochs=10, num_workers=16, model=pixart | fast, vae=SD | {"micro_batch_size": 4},
        text_encoder=t5(release, 200, shardformer=True), bucket_config=BUCKETS_1_1["image"],
    ) | clips(release, 1, 1, 256, "center") | {"scheduler": rflow}  # fmt: skip

    stdit3 = {"type": "STDiT3-XL/2", "from_pretrained": None, "qk_norm": True, **fast}
    text = t5(release, 300, shardformer=True, local_files_only=True)
    yield "opensora-v1-2/inference/sample", {
        "resolution": "240p", "aspect_ratio": "9:16", "num_frames": 51, "fps": 24, "frame_interval": 1, "save_fps": 24,
        "save_dir": "./samples/samples/", "seed": 42, "batch_size": 1, "multi_resolution": "STDiT2", "dtype": "bf16",
        "condition_frame_length": 5, "align": 5, "aes": 6.5, "flow": None, "text_encoder": t5(release, 300),
        "model": stdit3 | {"from_pretrained": "hpcai-tech/OpenSora-STDiT-v3"},
        "vae": V12 | {"from_pretrained": "hpcai-tech/OpenSora-VAE-v1.2"},
        "scheduler": {"type": "rflow", "use_timestep_transform": True, "num_sampling_steps": 30, "cfg_scale": 7.0},
    }  # fmt: skip

    def stage(**more: Any) -> Facts:
        facts = training(
            batch=None, every=500, lr=1e-4, num_workers=8, num_bucket_build_workers=16, dataset=VARIABLE, bucket_config=BUCKETS_1_2,
            model=stdit3, vae=V12, text_encoder=text, mask_ratios=MASKS_1_2, **LATE,
        ) | {"scheduler": RFLOW}  # fmt: skip
        return {key: value for key, value in (facts | more).items() if key not in ("batch_size", "sp_size")}

    frozen = stdit3 | {"freeze_y_embedder": True}
    features = frozen | {"skip_y_embedder": True}
    yield "opensora-v1-2/train/stage1", stage(model=frozen, ckpt_every=200, warmup_steps=1000)
    yield "opensora-v1-2/train/stage2", stage(model=frozen, ckpt_every=200)
    yield "opensora-v1-2/train/stage3", stage(model=frozen, ckpt_every=200, warmup_steps=1000)
    yield "opensora-v1-2/train/adapt", stage(grad_checkpoint=False)
    without = ("vae", "text_encoder", "bucket_config", "num_bucket_build_workers")
    yield "opensora-v1-2/train/stage1_feat", {
        **{key: value for key, value in stage(num_workers=4, lr=2e-4).items() if key not in without},
        "dataset": {"type": "BatchFeatureDataset"}, "model": features, "vae_out_channels": 4, "model_max_length": 300,
        "text_encoder_output_dim": 4096, "load_video_features": True, "load_text_features": True,
    }  # fmt: skip
    yield (
        "opensora-v1-2/misc/feat",
        stage(
            dataset=VARIABLE | {"dummy_text_feature": True},
            model=features,
            load_text_features=True,
            num_workers=0,
            ckpt_every=1,
            lr=2e-4,
        ),
    )
    yield "opensora-v1-2/misc/bs", stage(bucket_config=SEARCHED, base=("512", "408"), base_step_time=12, lr=2e-4)
    of_tools = {
        "num_workers": 8,
        "dtype": "bf16",
        "seed": 42,
        "dataset": VARIABLE,
        "model": stdit3,
        "vae": V12,
        "text_encoder": text,
    }
    yield (
        "opensora-v1-2/misc/eval_loss",
        {**of_tools, "bucket_config": EVALUATED, "num_eval_timesteps": 10, "scheduler": rflow},
    )
    yield "opensora-v1-2/misc/extract", {
        **of_tools, "bucket_config": BUCKETS_1_2, "num_bucket_build_workers": 16, "outputs": "outputs", "wandb": False,
        "vae": V12 | {"micro_batch_size": 32}, "save_text_features": True, "save_compressed_text_features": True, "bin_size": 250,
        "log_time": False,
    }  # fmt: skip

    weights = {"perceptual_loss_weight": 0.1, "kl_loss_weight": 1e-6}
    for name, frames in (("image", 1), ("video", 17)):
        yield f"vae/inference/{name}", {
            "image_size": (256, 256), "num_frames": frames, "dtype": "bf16", "batch_size": 1, "seed": 42, "save_dir": "samples/vae_video",
            "cal_stats": True, "log_stats_every": 100, "num_samples": 100, "num_workers": 4, **weights,
            "dataset": {"type": "VideoTextDataset", "data_path": None, "num_frames": frames, "image_size": (256, 256)},
            "model": V12 | {"from_pretrained": "hpcai-tech/OpenSora-VAE-v1.2", "micro_frame_size": None, "cal_loss": True},
        }  # fmt: skip
    parts = {
        "vae_2d": SDXL | {"local_files_only": True},
        "vae_temporal": {"type": "VAE_Temporal_SD", "from_pretrained": None},
    }
    for number, frames in ((1, 17), (2, 17), (3, 33)):
        first, last = number == 1, number == 3
        model = {"type": "VideoAutoencoderPipeline", "freeze_vae_2d": first, "cal_loss": True, **parts}
        model["from_pretrained"] = None if first else f"outputs/vae_stage{number - 1}"
        facts = training(
            batch=1, lr=1e-5, epochs=100, log_every=1, num_workers=16, outputs=f"outputs/vae_stage{number}"
        )
        mixed = (
            {"mixed_strategy": "mixed_video_random"}
            if last
            else {"mixed_strategy": "mixed_video_image", "mixed_image_ratio": 0.2}
        )
        yield f"vae/train/stage{number}", {
            **{key: value for key, value in facts.items() if key not in ("scheduler", "sp_size")}, **weights, **mixed, "model": model,
            "num_frames": frames, "image_size": (256, 256), "use_real_rec_loss": last, "use_z_rec_loss": not last,
            "use_image_identity_loss": first,
            "dataset": {"type": "VideoTextDataset", "data_path": None, "num_frames": frames, "frame_interval": 1, "image_size": (256, 256)},
        }  # fmt: skip


def all_files() -> dict[str, Facts]:
    """`<release>/<name>` -> what the file sets."""
    found = [(f"{release}/{name}", facts) for release in RELEASES for name, facts in families_of_all(release)]
    found += [(f"{release}/{name}", facts) for release in RELEASES[1:] for name, facts in opensora_1_1(release)]
    found += [(f"1.2/{name}", facts) for name, facts in only_1_2()]
    assert len(dict(found)) == len(found)
    return dict(found)


def schema_of(name: str) -> Schema:
    """The kind of config that a file is for its script."""
    if "/vae/" in name:
        return VAETrainConfig if "/train/" in name else VAEInferenceConfig
    return InferenceConfig if "/inference/" in name else TrainConfig


def write(facts: Facts, path: Path) -> str:
    """The facts as a config file."""
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in facts.items()))
    return str(path)
