"""Every registered thing, found by walking the registries, is built at toy size, obeys its contract and is used once."""

import pytest
import torch
from PIL import Image
from torch import nn

from opensora import contracts, registry
from opensora.acceleration.distributed import World, shutdown
from opensora.contracts import check_contract
from opensora.registry import DATASETS, MODELS, PLUGINS, SCHEDULERS
from opensora.utils.errors import UserError
from tests.models.denoisers import DENOISERS, TOY, inputs
from tests.models.nova import test_nova as nova
from tests.models.vaes import VAES, build, video_of

SMALL = {"depth": 2, "hidden_size": 32, "num_heads": 2, "caption_channels": 16, "model_max_length": 5}
NOVAS = [name for name in MODELS.choices() if name.startswith("NOVA")]
DISCRIMINATORS = {
    "PatchDiscriminator": ({"channels": 8}, (2, 1, 1, 2, 2)),
    "N_Layer_DISCRIMINATOR_3D": ({}, (2, 1, 1, 2, 2)),
    "DISCRIMINATOR_3D": (
        {"image_size": (32, 32), "num_frames": 4, "filters": 8, "channel_multipliers": (1, 2), "num_groups": 4}, (2, 1),
    ),
}  # fmt: skip
TEXT_ENCODERS = ["clip", "hf", "t5"]
VAE_TYPES = {cfg["type"] for cfg in VAES.values()}


def test_no_registered_model_is_left_out():
    """A new name fails here until one of the tests below builds it."""
    assert MODELS.choices() == sorted(
        [
            *DENOISERS,
            *NOVAS,
            *VAE_TYPES,
            *TEXT_ENCODERS,
            *DISCRIMINATORS,
            "cached",
            "classes",
            "clip-vision",
            "ScaleOnlyVAE",
        ]
    )


@pytest.mark.parametrize("name", DENOISERS)
def test_denoiser(name):
    model = registry.DENOISERS.build({"type": name, **TOY}).eval()
    cond = inputs(model)
    assert model(**cond).shape == (2, model.out_channels, *cond["x"].shape[2:])
    assert model.null_condition(3).shape == (3, *cond["y"].shape[1:])
    assert len(model.transformer_blocks()) >= TOY["depth"]
    assert model.flops(cond["x"].shape[2:], cond["y"].shape[2]) > 0
    assert 0 <= model.class_dropout_prob < 1


@pytest.mark.parametrize("name", NOVAS)
def test_nova(name):
    model = registry.DENOISERS.build({"type": name, **nova.TOY})
    cond = nova.inputs()
    assert model(**cond).shape == cond["noisy"].shape
    assert model.null_condition(3).shape == (3, *cond["y"].shape[1:])
    assert len(model.transformer_blocks()) >= nova.TOY["video_depth"] + nova.TOY["image_depth"]
    assert model.flops(cond["x"].shape[2:], 7) > 0
    assert 0 <= model.class_dropout_prob < 1


@pytest.mark.parametrize("name", VAES)
def test_vae(name):
    vae = build(name)
    check_contract(vae, contracts.VAE)
    x = video_of(vae, batch=1)
    z = vae.encode(x)
    assert z.shape == (1, vae.out_channels, *vae.latent_size(tuple(x.shape[2:])))
    assert vae.decode(z, num_frames=x.shape[2]).shape == x.shape


@pytest.mark.parametrize("name", DISCRIMINATORS)
def test_discriminator(name):
    settings, shape = DISCRIMINATORS[name]
    assert registry.DISCRIMINATORS.build({"type": name, **settings})(torch.rand(2, 3, 4, 32, 32)).shape == shape


@pytest.fixture(scope="module")
def encoder_folders(tmp_path_factory):
    """Untrained T5, CLIP and BERT with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertModel,
        CLIPTextConfig,
        CLIPTextModel,
        PreTrainedTokenizerFast,
        T5Config,
        T5EncoderModel,
    )

    words = ["<pad>", "</s>", "<unk>", "a", "cat"]
    size = {"vocab_size": len(words), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    encoders = {
        "t5": T5EncoderModel(T5Config(vocab_size=5, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
        "clip": CLIPTextModel(CLIPTextConfig(**size, **special, intermediate_size=16, max_position_embeddings=8)),
        "hf": BertModel(BertConfig(**size, intermediate_size=16, max_position_embeddings=8)),
    }
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=8,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("encoders")
    for name, encoder in encoders.items():
        encoder.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", TEXT_ENCODERS)
def test_text_encoder(name, encoder_folders):
    encoder = registry.TEXT_ENCODERS.build(
        {"type": name, "from_pretrained": str(encoder_folders / name), "model_max_length": 6}
    )
    y, mask = encoder.encode(["a cat", "cat"])
    assert y.shape == (2, 1, mask.shape[1], encoder.output_dim)
    assert encoder.output_dim == 16
    assert mask.dtype == torch.bool
    assert y.isfinite().all()


def test_class_encoder():
    y, mask = registry.TEXT_ENCODERS.build({"type": "classes", "num_classes": 10}).encode(["7", "0"])
    assert y.flatten().tolist() == [7, 0]
    assert mask.shape == (2, 1)


def test_cached_encoder(tmp_path):
    from opensora.datasets.cache import write_text
    from opensora.datasets.cache.moments import Job

    job = Job(tmp_path, World(0, 1, torch.device("cpu")), dtype="auto")
    write_text(["7"], MODELS.build({"type": "classes", "num_classes": 10}), job)
    assert registry.TEXT_ENCODERS.build({"type": "cached", "cache_dir": str(tmp_path)}).encode(["7"]).y.item() == 7


@pytest.mark.parametrize("name", SCHEDULERS.choices())
def test_scheduler(name):
    scheduler = SCHEDULERS.build({"type": name, "num_sampling_steps": 3})
    check_contract(scheduler, contracts.Sampler)
    model = nova.build(motion=False) if name == "nova" else MODELS.build({"type": "STDiT-XXS/2", **SMALL})
    cond = {"y": torch.randn(2, 1, 5, 16)}
    rngs = [torch.Generator().manual_seed(i) for i in range(2)]
    z = torch.randn(2, 4, 2, 4, 4)
    if name == "dpm-solver":
        with pytest.raises(UserError, match="iddpm"):
            scheduler.training_losses(model, z, cond, generators=rngs)
    else:
        assert scheduler.training_losses(model, z, cond, generators=rngs).shape == (2,)
    assert scheduler.sample(model, z, cond, generators=rngs).isfinite().all()


@pytest.mark.parametrize("name", DATASETS.choices())
def test_dataset(name, clips_csv, tmp_path):
    from opensora.datasets.cache import write_buckets, write_clips
    from opensora.datasets.cache.buckets import BUCKETS, Encoder
    from opensora.datasets.cache.moments import Job
    from opensora.datasets.sampler import BucketKey, SampleKey
    from opensora.datasets.table.table import read_table

    table = tmp_path / "clips.csv"
    table.write_text("\n".join(clips_csv.read_text().splitlines()[:2]) + "\n")
    settings = {"data_path": str(table), "root": str(clips_csv.parent), "num_frames": 2, "image_size": (16, 24)}
    if name == "CachedVideoTextDataset":
        vae = MODELS.build({"type": "VideoAutoencoderKL", "architecture": {"block_out_channels": (32,) * 4}}).eval()
        rows = read_table(str(table), str(clips_csv.parent))
        write_clips(rows, vae, Job(tmp_path / "cache", World(0, 1, torch.device("cpu"))), image_size=(16, 24))
        settings["cache_dir"] = str(tmp_path / "cache")
    key: SampleKey | BucketKey = SampleKey(0, 0)
    if name.startswith("VariableVideoText"):
        settings = {"data_path": str(table), "root": str(clips_csv.parent), "bucket_config": {"16x24": {2: (1.0, 1)}}}
        key = BucketKey(0, 0, 2, 16, 24)
    if name == "CachedVariableVideoTextDataset":
        from opensora.datasets import VariableVideoTextDataset

        buckets = {"data_path": str(table), "root": str(clips_csv.parent), "bucket_config": {"16x24": {2: (1.0, 1)}}}
        encoder = Encoder(lambda video: {"moments": video[0]}, {"vae": "pixels", "size_multiples": [8, 8]})
        job = Job(tmp_path / "cache", World(0, 1, torch.device("cpu")))
        write_buckets(VariableVideoTextDataset(**buckets), {BUCKETS: encoder}, job)
        settings = {**buckets, "cache_dir": str(tmp_path / "cache")}
        key = BucketKey(0, 0, 2, 16, 24)
    if name == "ImageFolderDataset":
        (tmp_path / "images" / "lake").mkdir(parents=True)
        Image.new("RGB", (24, 16)).save(tmp_path / "images" / "lake" / "1.png")
        settings = {"data_path": str(tmp_path / "images"), "num_frames": 1, "image_size": (16, 24)}
    if name == "RecordVideoTextDataset":
        from opensora.datasets.cache.records import RecordWriter

        features = {"moments": "tensor", "shape": ["int64"], "caption": "string", "text": "string"}
        with RecordWriter(tmp_path / "records", features) as writer:
            writer.write(
                {"moments": torch.zeros(8, 2, 2, 3).half(), "shape": [8, 2, 2, 3], "caption": "a", "text": "b"}
            )
        settings = {"data_path": str(tmp_path / "records")}
    item = DATASETS.build({"type": name, **settings})[key]
    num_frames = settings.get("num_frames", 2)
    assert item["video" if "video" in item else "moments"].shape[1] == num_frames
    assert ("moments" in item) == name.startswith(("Cached", "Record"))
    assert item["text"] or name == "InMemoryVideoDataset"  # which trains VAEs


@pytest.mark.parametrize("name", PLUGINS.choices())
def test_engine(name):
    if name.startswith("zero2"):
        pytest.skip("needs a GPU: tests/test_gpu_engines.py")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    world = World(0, 1, torch.device("cpu"))
    try:
        engine = PLUGINS.build({"type": name}, model=model, optimizer=optimizer, world=world, dtype="fp32")
        with engine.micro_step(last=True):
            loss = engine.model(torch.ones(3, 2)).square().mean()
        engine.backward(loss)
        assert engine.step() > 0
        assert engine.optimizer_state().keys() >= {"weight/exp_avg", "bias/step"}
    finally:
        shutdown()
