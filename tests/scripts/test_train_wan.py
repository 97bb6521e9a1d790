"""scripts/train.py with a tiny Wan - its own VAE and text encoder at toy size, real clips: resume, LoRA, experts, memory savers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from opensora.checkpoint.load import complete_checkpoints
from opensora.inference.pipeline import VideoPipeline
from opensora.models.loading import store_frozen
from opensora.models.wan.convert import FOLDERS
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.scripts.processes import finish, last_step, processes, wait_for
from tests.scripts.runs import assert_same_run, losses, tensors

ROOT = Path(__file__).parents[2]
WAN = {
    "type": "Wan",
    "in_channels": 4,
    "hidden_size": 24,
    "depth": 3,
    "num_heads": 2,
    "ffn_dim": 32,
    "caption_channels": 16,
}
LORA = ("--lora.rank=4", "--lora.target_modules=all-linear")
STREAMS = ("--weight-streaming=2", "--grad-checkpoint=block")
RESUMED = ("--max-steps=4", "--ckpt-every=2", "--batch-size=2")


@pytest.fixture(scope="session")
def toy_config(tmp_path_factory, toy_encoders) -> Path:
    """A training config of Wan that takes milliseconds a step; `train` and `together` run it."""
    from diffusers import AutoencoderKLWan
    from transformers import UMT5Config, UMT5EncoderModel

    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    vae = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [True, True]}
    AutoencoderKLWan(**vae, latents_mean=[0.1] * 4, latents_std=[0.9] * 4).save_pretrained(folder / "vae")
    text = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    UMT5EncoderModel(UMT5Config(**text)).save_pretrained(folder / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(toy_encoders["text"] / name, folder / "text")
    MODELS.build({**WAN, "model_max_length": 12}).net.save_pretrained(folder / "transformer")
    path = folder / "toy.py"
    path.write_text(
        f'''"""Toy."""
num_frames = 5
frame_interval = 2
image_size = (16, 24)
data_path = {str(ROOT / "assets/clips/clips.csv")!r}
num_workers = 0
dtype = "fp32"
device = "cpu"
model = dict({", ".join(f"{key}={value!r}" for key, value in WAN.items())})
vae = dict(type="DiffusersVideoVAE", from_pretrained={str(folder / "vae")!r})
text_encoder = dict(type="t5", from_pretrained={str(folder / "text")!r}, model_max_length=12)
scheduler = dict(type="rflow", num_sampling_steps=2, cfg_scale=3.0, sampler="unipc", shift=3.0)
seed = 7
epochs = 100
max_steps = 2
log_every = 1
ckpt_every = 0
batch_size = 1
lr = 1e-3
ema_decay = 0.9
'''
    )
    return path


@pytest.fixture
def base(toy_config) -> str:
    """The option that names the weights of a tiny Wan, as diffusers writes them."""
    return f"--ckpt-path={toy_config.parent / 'transformer'}"


# what a run can be -> options
KINDS = {
    "full": (),
    "LoRA": (*LORA, "--frozen-weights=bf16", "--dtype=bf16"),
    "LoRA on fp8": (*LORA, "--frozen-weights=fp8", "--dtype=bf16"),
    "LoRA on int8": (*LORA, "--frozen-weights=int8", "--dtype=bf16", "--grad-checkpoint=selective"),
    "streamed": STREAMS,
    "streamed LoRA on int8": (*LORA, "--frozen-weights=int8", "--dtype=bf16", *STREAMS),
    "high": ("--model.boundary=0.875", "--model.expert=high", "--scheduler.interval=(0.875, 1.0)"),
    "low": ("--model.boundary=0.875", "--model.expert=low", "--scheduler.interval=(0.0, 0.875)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_the_whole_run_to_the_bit(kind, train, base):
    options = (*RESUMED, *KINDS[kind], base)
    whole = train(*options, name="whole")
    rest = train(*options, f"--load={complete_checkpoints(whole)[0]}", name="rest")
    assert_same_run(whole, rest)
    assert losses(whole)[2:] == losses(rest)
    names = tensors(whole, "model").keys()
    assert all(("lora_" in name) == ("LoRA" in kind) for name in names)


def test_a_base_in_bf16_begins_as_one_in_fp32(train, base):
    """Autocast rounds it alike; later the adapters differ, whose first values peft rounds too."""
    fp32, bf16, fp8, int8 = (
        losses(train(*LORA, "--dtype=bf16", base, f"--frozen-weights={dtype}", name=dtype))
        for dtype in ("fp32", "bf16", "fp8", "int8")
    )
    assert fp32[0] == bf16[0]
    assert bf16 == pytest.approx(fp32, rel=2e-3)
    assert fp8 == pytest.approx(fp32, rel=2e-2)
    assert int8 == pytest.approx(fp32, rel=5e-3)
    assert fp32[0] not in (fp8[0], int8[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--frozen-weights=bf16", "--dtype=bf16"), "frozen_weights='bf16' has no effect without lora"),
        ((*LORA, "--frozen-weights=bf16"), "frozen_weights='bf16' needs dtype='bf16'"),
        (("--weight-streaming=2", "--plugin=fsdp2"), "weight_streaming does not work with plugin='fsdp2'"),
        (("--weight-streaming=2", "--cuda-graphs=True"), "cuda_graphs=True does not work with weight_streaming"),
        (("--weight-streaming=2", "--optimizer-offload=True"), "optimizer_offload does nothing that weight_streaming"),
        (("--weight-streaming=2", "--optimizer=muon"), "optimizer='muon' does not work with weight_streaming"),
        (("--weight-streaming=3",), "weight_streaming=3: a number of blocks from 2 to 2, as the model has 3"),
        (("--activation-offload=True", "--grad-checkpoint=attention"), "keeps with compile=True only"),
        (
            (*KINDS["LoRA on fp8"], "--plugin=fsdp2", "--fsdp-gather=bf16"),
            "fsdp_gather='bf16' would cast weights in fp8",
        ),
        ((*KINDS["LoRA on fp8"], "--plugin=zero2"), "frozen_weights='fp8' does not work with plugin='zero2'"),
        (("--fsdp-gather=bf16",), "fsdp_gather='bf16' has no effect with plugin='ddp'"),
        (("--plugin=fsdp2", "--fsdp-gather=bf16"), "fsdp_gather='bf16' is for dtype='bf16'"),
    ],
)
def test_settings_that_cannot_work(options, words, train, base, capsys):
    with pytest.raises(SystemExit):
        train(*options, base)
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_validation_makes_videos_and_a_checkpoint_samples_the_same_block_by_block(train, base):
    run = train("--val-every=2", "--val-prompts=['a white dog']", "--ckpt-every=2", "--dtype=bf16", base)
    assert len(list(run.rglob("*.mp4"))) == 1
    sampled = {}
    ways = (("none", "fp32"), ("none", "bf16"), ("block", "bf16"), ("model", "bf16"), ("none", "fp8"), ("block", "fp8"))
    for offload, frozen in ways:
        pipeline = VideoPipeline.from_pretrained(
            complete_checkpoints(run)[-1], "cpu", offload=offload, frozen_weights=frozen, dtype="bf16", num_frames=5
        )
        assert (pipeline.model.net.proj_out.weight.dtype == torch.float32) == (frozen == "fp32")
        sampled[offload, frozen] = pipeline(["a white dog", "a city"])
    fp8 = sampled.pop(("none", "fp8"))
    assert torch.equal(sampled.pop(("block", "fp8")), fp8)
    first = sampled.pop(("none", "fp32"))
    assert not torch.equal(fp8, first)
    assert all(torch.equal(video, first) for video in sampled.values())
    with pytest.raises(UserError, match="frozen_weights='bf16' needs dtype='bf16'"):
        VideoPipeline.from_pretrained(complete_checkpoints(run)[-1], "cpu", frozen_weights="bf16", dtype="fp32")
    assert not torch.equal(first[0], first[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "LoRA"])
def test_streams_change_no_bit(kind, train, base, capsys):
    options = (*KINDS[kind], "--val-every=1", "--val-prompts=['a white dog']", base)
    runs = [
        train(*options, *streams, name=f"{len(streams)}") for streams in ((), (*STREAMS, "--activation-offload=True"))
    ]
    assert_same_run(*runs)
    assert losses(runs[0]) == losses(runs[1])
    assert "activation_offload has no effect on a CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_lora_is_merged_before_its_base_is_quantised(train, base):
    checkpoint = complete_checkpoints(train(*KINDS["LoRA on fp8"], base, "--ckpt-every=2"))[-1]
    bf16, fp8, without = (
        VideoPipeline.from_pretrained(checkpoint, "cpu", dtype="bf16", num_frames=5, **options).model
        for options in (
            {"frozen_weights": "bf16"},
            {"frozen_weights": "fp8"},
            {"frozen_weights": "fp8", "lora_scale": 0.0},
        )
    )
    store_frozen(bf16, "fp8")
    weight = fp8.net.blocks[0].ffn.net[2].weight
    assert weight.dtype == torch.float8_e4m3fn
    assert not torch.equal(weight, without.net.blocks[0].ffn.net[2].weight)
    assert all(torch.equal(tensor, bf16.state_dict()[name]) for name, tensor in fp8.state_dict().items())


@pytest.mark.slow
@pytest.mark.nightly
def test_kill_9_and_latest_goes_on_to_the_bit(toy_config, base, tmp_path):
    options = ("--load=latest", "--exp-name=run", "--ckpt-every=1", "--max-steps=16", *KINDS["LoRA"], base)
    with processes(1, toy_config, tmp_path, *options) as started:
        wait_for(lambda: complete_checkpoints(tmp_path / "run") != [] and last_step(tmp_path) > 2)
        started[0].kill()
    assert last_step(tmp_path) < 16
    with processes(1, toy_config, tmp_path, *options) as started:
        finish(started)
    with processes(1, toy_config, tmp_path, *KINDS["LoRA"], base, "--exp-name=whole", "--max-steps=16") as started:
        finish(started)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# two processes -> options
TOGETHER = {
    "sp": ("--sp-size=2", "--batch-size=2"),
    "fsdp2": ("--plugin=fsdp2", "--batch-size=1"),
    "fsdp2-zero3-sp": ("--plugin=fsdp2", "--fsdp-reshard=zero3", "--sp-size=2", "--batch-size=2"),
}
HALF = {
    "lora": ("--plugin=fsdp2", *KINDS["LoRA"]),
    "streams": (*KINDS["LoRA"], *STREAMS),
    "gather": ("--plugin=fsdp2", "--fsdp-gather=bf16", "--fsdp-reduce=bf16", "--dtype=bf16"),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_as_one(train, together, base):
    masks = '--mask-ratios={"image_head": 0.5}'  # some first frames are given: timesteps of tokens
    one = train("--batch-size=2", masks, base, name="one")
    lora = train("--batch-size=2", *KINDS["LoRA"], base, name="one-lora")
    bf16 = train("--batch-size=2", "--dtype=bf16", base, name="one-bf16")
    runs = [(name, masks, base, *options) for name, options in TOGETHER.items()]
    found = together(*runs, *((name, base, *options) for name, options in HALF.items()))
    for run in found[: len(TOGETHER)]:
        torch.testing.assert_close(losses(run), losses(one), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(tensors(run, "ema"), tensors(one, "ema"), atol=2e-5, rtol=1e-4)
    for run, alone in zip(found[len(TOGETHER) :], (lora, lora, bf16), strict=True):
        torch.testing.assert_close(losses(run), losses(alone), atol=1e-3, rtol=2e-3)
    assert json.loads((found[0] / "config.json").read_text())["sp_size"] == 2


@pytest.mark.slow
def test_a_checkpoint_of_one_experts_lora_samples_with_both(train, toy_config, tmp_path):
    for part in FOLDERS.values():
        shutil.copytree(toy_config.parent / "transformer", tmp_path / "pipeline" / part)
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    run = train(*LORA, *KINDS["low"][:2], f"--ckpt-path={tmp_path / 'pipeline'}", "--ckpt-every=2")
    pipeline = VideoPipeline.from_pretrained(complete_checkpoints(run)[-1], "cpu", num_frames=5)
    high, low = (net.blocks[0].attn1.to_q.weight for net in (pipeline.model.net, pipeline.model.net_2))
    assert not torch.equal(high, low)  # which began as the same
    assert pipeline(["a white dog"]).isfinite().all()
