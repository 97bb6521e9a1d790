"""NOVA's training guide from end to end at toy size: cache, config, training, resume; each snippet with its import changed."""

import json
import math
import os
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from opensora.config.load import InferenceConfig, TrainConfig, parse_config
from opensora.datasets.cache.records import RecordWriter
from opensora.datasets.cache.records_dataset import RecordVideoTextDataset, first_sentence
from opensora.datasets.sampler import SampleKey
from opensora.inference.build import COMPONENTS
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.sizes import trained_sizes
from opensora.models.text_encoder.hf import HFTextEncoder
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.training.batch_encoder import BatchEncoder
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tests.models.nova.toy import build
from tools.cache_features import cache_features

SIZES = {"width": 32, "num_heads": 1, "video_depth": 2, "image_depth": 4, "head_depth": 2, "caption_channels": 16,
         "model_max_length": 256}  # fmt: skip
NAME = "diffusion_pytorch_model.safetensors"
FLUSH = ("--num-workers=0", "--device=cpu", "--dtype=fp32", "--text-encoder.model_max_length=12", "--warmup-steps=0")


def cache_pictures(vae_folder, folder, count=4):
    """The guide's section 1, for images; on a CPU, and in fp32 where its VAE computes in fp16."""
    from diffusers import AutoencoderKL

    import opensora.datasets.cache.records as codewithgpu

    device, dtype = torch.device("cpu"), torch.float32
    vae = AutoencoderKL.from_pretrained(vae_folder)
    vae = vae.to(device=device, dtype=dtype).eval()

    features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"]}
    _, writer = os.makedirs(folder), codewithgpu.RecordWriter(folder, features)  # noqa: PTH103
    for i in range(count):
        img = PIL.Image.fromarray(np.random.default_rng(i).integers(0, 255, (64, 96, 3), np.uint8))
        x = torch.as_tensor(np.array(img)[None, ...].transpose(0, 3, 1, 2)).to(device).to(dtype)
        with torch.no_grad():
            x = vae.encode(x.sub(127.5).div(127.5)).latent_dist.parameters.cpu().half().numpy()[0]
        example = {"caption": "a grey rabbit. in the city", "text": "a rabbit"}
        writer.write({"shape": x.shape, "moments": x.tobytes(), **example})
    writer.close()


def cache_videos(folder, count=4):
    """Records with the fields of videos."""
    features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"], "flow": "float64"}
    with RecordWriter(folder, features) as writer:
        for i in range(count):
            x = np.random.default_rng(i).normal(size=(8, 3, 8, 8)).astype(np.float16)
            writer.write({"shape": x.shape, "moments": x.tobytes(), "caption": "a dog", "text": "", "flow": 5})


@pytest.fixture
def pipeline(tmp_path, toy_encoders, monkeypatch):
    """A folder as the guide's weights are."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "nova"
    shutil.copytree(toy_encoders["vae"], folder / "vae")
    shutil.copytree(toy_encoders["text"], folder / "text_encoder")
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps({"arch": ["vit_d2w32", "vit_d4w32", "mlp_d2w32"]}))
    state = {name: tensor.contiguous() for name, tensor in build(**SIZES).state_dict().items()}
    save_file(state, folder / "transformer" / NAME)
    return folder


@pytest.fixture
def train(train_script, pipeline, monkeypatch):
    """Write the guide's config with some keys, and run scripts/train.py with it; returns the run's folder."""

    def run(kind, prefix, *options, steps=4, snapshot=2):
        from opensora.config.yacs import default_cfg

        cfg = default_cfg()
        cfg.PIPELINE.TYPE = f"nova_train_{kind}"
        cfg.MODEL.WEIGHTS = str(pipeline)
        cfg.SOLVER.MAX_STEPS, cfg.SOLVER.SNAPSHOT_EVERY, cfg.SOLVER.SNAPSHOT_PREFIX = steps, snapshot, prefix
        cfg.SOLVER.EMA_EVERY, cfg.SOLVER.DISPLAY, cfg.SOLVER.BASE_LR = 2, 1, 1e-3
        cfg.TRAIN.DATASET, cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.DEVICE_EMA = f"./{kind}_dataset", 2, "cpu"
        open(f"./{prefix}.yml", "w").write(str(cfg))  # noqa: PTH123, SIM115
        monkeypatch.setattr(sys, "argv", ["train.py", "--cfg", f"./{prefix}.yml", *FLUSH, *options])
        train_script.main()
        return pipeline.parent / "outputs" / prefix

    return run


def read(run, step, part="model"):
    return {name: tensor.double() for name, tensor in weights(run, step, part).items()}


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run, step, part="model"):
    (folder,) = run.glob(f"*-global_step{step}")
    return load_file(folder / part / f"{part}.safetensors")


@pytest.mark.slow
def test_pictures_are_trained_on_and_a_resume_changes_nothing(train, pipeline):
    cache_pictures(pipeline / "vae", "./t2i_dataset")
    whole = train("t2i", "whole")
    assert len(losses(whole)) == 4
    first = train("t2i", "first", "--max-steps=2")
    (stop,) = first.glob("*-global_step2")
    second = train("t2i", "second", f"--load={stop}")
    assert losses(first) + losses(second) == losses(whole)
    for part in ("model", "ema"):
        expected = weights(whole, 4, part)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second, 4, part).items())
    start = build(**SIZES, motion=False).state_dict()
    assert not any(
        torch.equal(start[name], tensor) for name, tensor in weights(whole, 4).items() if "qkv.weight" in name
    )


def test_videos_are_trained_on_with_their_motion(train):
    cache_videos("./t2v_dataset")
    run = train("t2v", "video", "--vae.type=VideoAutoencoderKL", steps=2)
    assert all(np.isfinite(losses(run)))
    # what was trained is in the published names
    assert weights(run, 2).keys() == build(**SIZES).state_dict().keys()


@pytest.mark.slow
def test_every_level_of_checkpointing_trains_alike(train):
    """--grad-checkpoint wins over the guide's key; level 3, all three stacks, "mlp" here, is that of the guide's snippets."""
    cache_videos("./t2v_dataset")
    runs = [
        train("t2v", f"level{n}", "--vae.type=VideoAutoencoderKL", f"--grad-checkpoint={n}", steps=2) for n in range(4)
    ]
    for run in runs[1:]:
        assert losses(run) == losses(runs[0])
        assert all(torch.equal(w, weights(runs[0], 2)[name]) for name, w in weights(run, 2).items())


@pytest.mark.slow
def test_averages_on_either_device_are_the_dense_ones(train, pipeline):
    """Every 2 steps, of the trained weights; what is frozen is as it was. On a GPU: tests/test_gpu_engines.py."""
    cache_pictures(pipeline / "vae", "./t2i_dataset")
    runs = {device: train("t2i", device, f"--ema-device={device}", snapshot=1) for device in ("cpu", "model")}
    start = {name: w.double() for name, w in load_file(pipeline / "transformer" / NAME).items()}
    expected, decay = start, 0.99 ** (1 / 2)
    for last in (2, 4):
        kept = math.prod(min(decay, (1 + step) / (10 + step)) for step in (last - 1, last))
        now = read(runs["cpu"], last)
        expected = {name: kept * expected[name] + (1 - kept) * w for name, w in now.items()}
    averages = read(runs["cpu"], 4, "ema")
    assert not torch.equal(averages["image_decoder.head.weight"], now["image_decoder.head.weight"])
    for name, value in expected.items():
        torch.testing.assert_close(averages[name], value, rtol=1e-6, atol=1e-7)
        assert torch.equal(averages[name], read(runs["model"], 4, "ema")[name])
    frozen = (
        "text_embed.norm.weight",
        "text_embed.weight",
        "video_pos_embed.norm.bias",
        "video_encoder.patch_embed.proj.weight",
    )
    for name in frozen:  # of text-to-image training, as published
        assert torch.equal(averages[name], start[name])


def test_a_deepspeed_file_trains_the_same(train, pipeline):
    """The guide's ZeRO-2 file, in fp32 as everything here: one process has nothing to share."""
    cache_pictures(pipeline / "vae", "./t2i_dataset")
    deepspeed = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    (pipeline.parent / "zero2_bf16.json").write_text(json.dumps(deepspeed))
    whole, sharded = train("t2i", "plain", steps=2), train("t2i", "zero2", "--deepspeed=zero2_bf16.json", steps=2)
    assert json.loads((sharded / "config.json").read_text())["plugin"] == "fsdp2"
    assert losses(sharded) == pytest.approx(losses(whole), rel=1e-6)


def test_a_video_model_without_flow_is_told_what_to_do(train, pipeline, capsys):
    cache_pictures(pipeline / "vae", "./t2v_dataset")
    with pytest.raises(SystemExit, match="2"):
        train("t2v", "none", "--vae.type=VideoAutoencoderKL")
    message = capsys.readouterr().err
    assert "the denoiser needs each video's flow, and the data have none" in message
    assert "tools.cache_features TRAIN_CONFIG --what flow" in message


CLIPS = """
num_frames = 2
image_size = (32, 64)
dataset = dict(type="CachedVideoTextDataset", data_path="clips.csv", root={root!r}, cache_dir="cache")
num_workers = 0
model = dict(type="NOVA", width=32, num_heads=1, video_depth=1, image_depth=2, head_depth=1)
vae = dict(type="VideoAutoencoderKL", from_pretrained={vae!r})
text_encoder = dict(type="hf", from_pretrained={text!r}, model_max_length=12)
scheduler = dict(type="nova")
device, dtype, plugin, outputs = "cpu", "fp32", "ddp", "outputs"
epochs, max_steps, log_every, ckpt_every, batch_size = 100, 4, 1, 2, 2
lr, warmup_steps, ema_decay = 1e-2, 0, 0.9
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_video_model_trains_from_a_cache_of_real_clips_and_a_resume_changes_nothing(
    tmp_path, toy_encoders, train_script, monkeypatch, repo_root
):
    """The table has no flow: it is measured with the moments, and training is conditioned on it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips.csv").write_text(
        "path,text\npink_clouds.mp4,the sky\nwhite_dog.mp4,a white dog\ncup_tilted.mp4,a cup\n"
    )
    folders = {name: str(path) for name, path in toy_encoders.items()}
    (tmp_path / "config.py").write_text(CLIPS.format(root=str(repo_root / "assets" / "clips"), **folders))
    assert cache_features(["config.py"]) == {"clips": (3, 0), "flow": (3, 0)}

    def train(name, *options):
        monkeypatch.setattr(sys, "argv", ["train.py", "config.py", f"--exp-name={name}", *options])
        train_script.main()
        return tmp_path / "outputs" / name

    whole, first = train("whole"), train("first", "--max-steps=2")
    (stop,) = first.glob("*-global_step2")
    second = train("second", f"--load={stop}")
    assert losses(first) + losses(second) == losses(whole)
    for part in ("model", "ema"):
        expected = weights(whole, 4, part)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second, 4, part).items())
    (tmp_path / "clips.csv").write_text(
        "path,text,flow\npink_clouds.mp4,the sky,1\nwhite_dog.mp4,a white dog,1\ncup_tilted.mp4,a cup,1\n"
    )
    assert (
        losses(train("conditioned"))[-1] != losses(whole)[-1]
    )  # the head starts at zero: conditions enter after two steps


def test_a_tenth_of_the_captions_is_dropped(pipeline):
    """Dropped captions are, to the model, no text: whatever their length."""
    model = build(**{**SIZES, "model_max_length": 12})
    text_encoder = HFTextEncoder(str(pipeline / "text_encoder"), model_max_length=12)
    batch = {"moments": torch.zeros(400, 8, 1, 8, 8), "text": ["a rabbit", "the grey dog in the city"] * 200}
    batch |= {name: torch.ones(400) for name in ("fps", "height", "width", "num_frames", "flow")}
    vae = VideoAutoencoderKL(str(pipeline / "vae"))
    _, cond = BatchEncoder(vae, text_encoder, model, torch.device("cpu"))(batch, generators(0, "drop", ids=range(400)))
    tokens = model.text_embed(cond["y"], cond["mask"])
    none = model.text_embed(model.null_condition(1)[:, :, :12], None)
    dropped = [bool(torch.equal(row, none[0])) for row in tokens]
    assert 0.06 < sum(dropped) / 400 < 0.14
    assert 0 < sum(dropped[::2]) < sum(dropped)


def test_records_are_samples(tmp_path):
    cache_videos(tmp_path / "records")
    dataset = RecordVideoTextDataset(str(tmp_path / "records"), fps=8)
    item = dataset[SampleKey(0, 1)]
    expected = np.random.default_rng(1).normal(size=(8, 3, 8, 8)).astype(np.float16)
    assert torch.equal(item["moments"], torch.from_numpy(expected).float())
    assert (float(item["flow"]), float(item["fps"]), float(item["num_frames"])) == (5, 8, 9)
    assert (float(item["height"]), float(item["width"])) == (64, 64)
    assert item["text"] == "a dog"


def test_half_of_the_texts_are_the_short_ones(tmp_path, toy_encoders):
    cache_pictures(toy_encoders["vae"], tmp_path / "records", count=1)
    dataset = RecordVideoTextDataset(str(tmp_path / "records"))
    texts = [dataset[SampleKey(epoch, 0)]["text"] for epoch in range(100)]
    assert set(texts) == {"a rabbit", "a grey rabbit. in the city"}
    assert 35 <= texts.count("a rabbit") <= 65
    assert first_sentence("a lake. a boat.") == "a lake."
    assert first_sentence("version 2.5 of it! yes") == "version 2.5 of it!"
    assert first_sentence("no end") == "no end"


def test_records_in_fp32_and_without_short_texts(tmp_path):
    """What the guide's snippet writes with a VAE in fp32, and with fewer features."""
    x = np.random.default_rng(0).normal(size=(8, 4, 4)).astype(np.float32)
    with RecordWriter(tmp_path / "records", {"moments": "bytes", "caption": "string", "shape": ["int64"]}) as writer:
        writer.write({"shape": x.shape, "moments": x.tobytes(), "caption": "a lake. a boat."})
    dataset = RecordVideoTextDataset(str(tmp_path / "records"))
    assert torch.equal(dataset[SampleKey(0, 0)]["moments"], torch.from_numpy(x)[:, None])
    assert (
        {dataset[SampleKey(epoch, 0)]["text"] for epoch in range(20)}
        == {*dataset.all_captions()}
        == {"a lake.", "a lake. a boat."}
    )


def test_folders_that_are_no_such_records(tmp_path):
    with RecordWriter(tmp_path / "other", {"path": "string"}) as writer:
        writer.write({"path": "a"})
    with pytest.raises(UserError, match=r"records without moments, shape, caption; a RecordVideoTextDataset needs"):
        RecordVideoTextDataset(str(tmp_path / "other"))
    features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"]}
    with RecordWriter(tmp_path / "mixed", features) as writer:
        for side in (4, 8):
            writer.write({"moments": b"", "caption": "", "text": "", "shape": [8, side, side]})
    with pytest.raises(UserError, match=r"records of 2 sizes, such as 8x1x4x4 and 8x1x8x8"):
        RecordVideoTextDataset(str(tmp_path / "mixed"))


SMALL = ("--device=cpu", "--dtype=fp32", "--text-encoder.model_max_length=12", "--scheduler.num_sampling_steps=2",
         "--scheduler.num_diffusion_steps=2", "--prompt=a rabbit", "--save-dir=out", "--verbose=1")  # fmt: skip


def test_the_guides_config_samples_what_it_trained_in_the_records_size(train, pipeline, caplog, monkeypatch):
    cache_pictures(pipeline / "vae", "./t2i_dataset")
    run = train("t2i", "run", steps=1, snapshot=1)
    (checkpoint,) = run.glob("*-global_step1")
    assert trained_sizes(str(checkpoint)) == {
        (1, 64, 96)
    }  # it was the config's default, and sampling warned of another
    command = ["run.yml", f"--ckpt-path={checkpoint}", "--image-size", "64", "96", *SMALL]
    caplog.clear()
    monkeypatch.setattr(sys, "argv", ["inference.py", *command])
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "inference.py"), run_name="__main__")
    assert PIL.Image.open("out/sample_0000.png").size == (96, 64)
    assert "no size that" not in caplog.text


def test_a_pipelines_folder_is_a_config(pipeline):
    """As diffnext saves one; its Python class has the name of the folder's model_index.json."""
    (pipeline / "model_index.json").write_text('{"_class_name": "NOVAPipeline"}')
    file = pipeline / "transformer" / "config.json"
    config = {"arch": ["vit_d2w32", "vit_d4w32", "mlp_d2w32"], "image_size": [64, 96], "video_base_size": [9, 2, 3]}
    file.write_text(json.dumps({**config, "image_base_size": [4, 6]}))
    video = parse_config(InferenceConfig, COMPONENTS, [str(pipeline), "--prompt=a dog"])
    assert (video.num_frames, video.image_size, video.fps) == (33, (64, 96), 12)
    assert (video.model["motion"], video.vae["type"]) == (True, "DiffusersVideoVAE")
    file.write_text(json.dumps({"arch": config["arch"], "image_size": 64}))
    made = VideoPipeline.from_pretrained(pipeline, dtype="fp32", device="cpu", text_encoder={
        "type": "hf", "from_pretrained": str(pipeline / "text_encoder"), "model_max_length": 12,
    })  # fmt: skip
    assert made.defaults[:2] == (1, (64, 64))
    torch.testing.assert_close(
        made.model.state_dict()["text_embed.weight"], load_file(pipeline / "transformer" / NAME)["text_embed.weight"]
    )
    file.write_text('{"_class_name": "PixArtTransformer2DModel"}')
    with pytest.raises(UserError, match=r"only NOVA's pipelines .* is a PixArtTransformer2DModel.*--ckpt-path"):
        parse_config(InferenceConfig, COMPONENTS, [str(pipeline), "--prompt=a dog"])
    with pytest.raises(UserError, match="is a folder or a device"):
        parse_config(TrainConfig, COMPONENTS, [str(pipeline)])
