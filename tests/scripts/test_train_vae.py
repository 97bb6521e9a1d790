"""scripts/train_vae.py end to end at toy size: what it leaves, exact resume, user errors; and tools/eval_vae on it."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from opensora.datasets.datasets import VideoTextDataset
from opensora.models.vae import DiffusersVideoVAE, VideoAutoencoderKL
from opensora.registry import DATASETS
from opensora.utils.ckpt import complete_checkpoints, open_checkpoint
from tests.models.vae.lpips_files import random_alex

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A table of ten smooth coloured pictures of two sources."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    rows = ["path,source"]
    for i in range(10):
        colours = Image.fromarray(rng.integers(0, 255, (3, 4, 3), dtype=np.uint8))
        colours.resize((52, 40), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
        rows.append(f"{i}.png,{'even' if i % 2 == 0 else 'odd'}")
    (folder / "pictures.csv").write_text("\n".join(rows) + "\n")
    return folder / "pictures.csv"


@pytest.fixture(scope="module")
def config(tmp_path_factory, pictures) -> Path:
    path = tmp_path_factory.mktemp("config") / "toy_vae.py"
    path.write_text(
        f'''"""Toy."""
data_path = {str(pictures)!r}
dataset = dict(type="VideoTextDataset", transform_name="random_crop", text_columns=())
image_size = (16, 24)
num_workers = 0
vae = dict(
    type="VideoAutoencoderKL",
    architecture=dict(
        block_out_channels=(8, 8, 16, 16), layers_per_block=1, mid_block_add_attention=False, norm_num_groups=4
    ),
)
loss = dict(l1=1.0, mse=1.0, pooled=1.0, kl=1e-5)
dtype = "fp32"
device = "cpu"
seed = 7
max_steps = 8
log_every = 1
ckpt_every = 4
batch_size = 4
lr = 2e-3
lr_schedule = "cosine"
warmup_steps = 2
ema_decay = 0.9
'''
    )
    return path


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_vae_script", ROOT / "scripts" / "train_vae.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(script, config, tmp_path, monkeypatch):
    """Run the script in this process with some overrides; returns the run's folder."""

    def run(*options: str, name: str = "run") -> Path:
        argv = ["train_vae.py", str(config), f"--outputs={tmp_path}", f"--exp-name={name}", *options]
        monkeypatch.setattr(sys, "argv", argv)
        script.main()
        return tmp_path / name

    return run


def entries(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(run: Path, part: str) -> dict[str, torch.Tensor]:
    return open_checkpoint(complete_checkpoints(run)[-1]).tensors(part)


def test_it_learns_and_leaves_a_vae_that_loads(train):
    run = train("--max-steps=32", "--ckpt-every=32", "--warmup-steps=4")
    log = entries(run)
    assert {"loss", "l1", "mse", "pooled", "kl", "psnr", "lr", "grad_norm", "epoch", "samples_per_s"} <= log[-1].keys()
    first, last = (np.mean([entry["loss"] for entry in part]) for part in (log[:5], log[-5:]))
    assert last < 0.8 * first
    vae = VideoAutoencoderKL(str(run / "vae"), posterior="mode")
    ema = tensors(run, "ema")
    for name, weight in vae.state_dict().items():
        assert torch.equal(weight, ema[name].half().float()), name
    assert AutoencoderKL.from_pretrained(run / "vae").config["latents_std"] is not None
    assert "raw latents" in (run / "log.txt").read_text()


def test_the_exported_statistics_whiten_the_latents(train, script):
    run = train()
    vae = VideoAutoencoderKL(str(run / "vae"), posterior="mode").requires_grad_(False).eval()
    config = json.loads((run / "config.json").read_text())
    dataset = script.build_module(config["dataset"], script.DATASETS, seed=config["seed"])
    videos = torch.stack([dataset[script.SampleKey(0, i)]["video"] for i in range(len(dataset))])
    z = vae.encode(videos)
    # fp16 weights
    torch.testing.assert_close(z.mean((0, 2, 3, 4)), torch.zeros(4), rtol=0, atol=0.03)
    torch.testing.assert_close(z.std((0, 2, 3, 4), correction=0), torch.ones(4), rtol=0, atol=0.03)


def test_k_then_resume_then_k_is_2k_bit_for_bit(train):
    whole = train(name="whole")
    half = complete_checkpoints(whole)[0]
    assert half.name == "epoch1-global_step4"  # 3 batches an epoch: both halves cross an epoch's end
    rest = train(f"--load={half}", name="rest")
    for part in ("model", "ema", "optimizer"):
        left, right = tensors(whole, part), tensors(rest, part)
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert [e["loss"] for e in entries(whole)[4:]] == [e["loss"] for e in entries(rest)]
    weights = [VideoAutoencoderKL(str(run / "vae")).fingerprint() for run in (whole, rest)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image-size", "20", "24"], "the nearest is 16x24"),
        (["--loss.lpips=0.1", "--lpips=nowhere.pth"], "neither alex nor vgg nor a file"),
        (["--adversarial-start=5"], "adversarial_start=5 has no effect without a discriminator"),
        (["--mixed-lengths", "1", "2"], "must be from 1 to num_frames=1"),
        (["--dataset.data-path=nowhere.csv"], "nowhere.csv does not exist"),
        (["--vae.architecture.latent_chanels=3"], "Did you mean 'latent_channels'"),
    ],
)
def test_mistakes_end_with_exit_code_2_before_a_run_is_made(train, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        train(*options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class OneBadPicture(VideoTextDataset):
    """A picture of the table has a pixel that is no number."""

    def __getitem__(self, key):
        item = super().__getitem__(key)
        if Path(item["path"]).name == "3.png":
            item["video"][0, 0, 0, 0] = torch.nan
        return item


@pytest.fixture
def bad_data(monkeypatch, train):
    """Options for `OneBadPicture`, which is registered meanwhile."""
    monkeypatch.setitem(DATASETS._module_dict, "OneBadPicture", OneBadPicture)
    return ["--dataset", str({"type": "OneBadPicture", "transform_name": "random_crop", "text_columns": []})]


def test_a_step_that_is_no_number_ends_the_run_with_its_files(train, bad_data, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        train(*bad_data, "--ckpt-every=1")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "was not taken: its loss is nan" in said
    assert "3.png" in said
    assert "--on-nonfinite skip goes on" in said
    for path in complete_checkpoints(tmp_path / "run"):
        assert all(bool(t.isfinite().all()) for part in ("model", "ema", "optimizer")
                   for t in open_checkpoint(path).tensors(part).values())  # fmt: skip


def test_a_step_that_is_no_number_is_skipped_and_counted(train, bad_data, capsys):
    """With a discriminator, whose step is not taken either; two epochs, so two of six steps."""
    gan = ["--discriminator", "{'type': 'PatchDiscriminator', 'dims': 2, 'channels': 8, 'num_layers': 1}"]
    run = train(*bad_data, *gan, "--on-nonfinite=skip", "--max-steps=6", "--log-every=3", "--ckpt-every=0")
    log = entries(run)
    assert [entry["skipped_steps"] for entry in log] == [1, 2]
    assert all(np.isfinite(value) for entry in log for value in entry.values())
    for part in ("model", "ema", "optimizer", "discriminator", "discriminator_optimizer"):
        saved = tensors(run, part)
        assert saved
        assert all(bool(value.isfinite().all()) for value in saved.values()), part
    assert np.isfinite(AutoencoderKL.from_pretrained(run / "vae").config["latents_std"]).all()
    assert "1 videos have latents that are not finite" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train(*bad_data, "--on-nonfinite=skip", "--max-skipped=0", name="none")
    assert "more than max_skipped=0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def video_options(tmp_path_factory, pictures) -> list[str]:
    """A causal video VAE on real clips and pictures, with all that can be switched on."""
    folder = tmp_path_factory.mktemp("video")
    clips = ROOT / "assets/clips"
    rows = "".join(f"{clips / name}\n" for name in ("white_dog.mp4", "cup_portrait.mp4"))
    (folder / "train.csv").write_text(f"path\n{rows}{pictures.parent / '0.png'}\n")
    (folder / "held_out.csv").write_text(f"path\n{clips / 'city_teal.mp4'}\n")
    architecture = {
        "type": "AutoencoderKLWan", "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1,
        "temperal_downsample": [True], "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
        "latents_mean": None, "latents_std": None,
    }  # fmt: skip
    return [
        f"--data-path={folder / 'train.csv'}", "--dataset", "{'type': 'InMemoryVideoDataset'}",
        "--vae", str({"type": "DiffusersVideoVAE", "architecture": architecture}),
        "--num-frames=5", "--mixed-lengths", "5", "1", "--image-size", "32", "32", "--batch-size=2",
        "--loss.lpips=0.1", f"--lpips={random_alex(folder / 'alex.safetensors')}", "--lpips-frames=2",
        "--reconstruction=nll", "--logvar-init=-1", "--adversarial-start=2",
        "--discriminator", "{'type': 'PatchDiscriminator', 'dims': 3, 'channels': 8, 'num_layers': 1}",
        f"--eval-data-path={folder / 'held_out.csv'}", "--eval-every=4", "--max-steps=8", "--warmup-steps=0",
    ]  # fmt: skip


def test_video_with_gan_and_nll_goes_on_bit_for_bit_and_leaves_all_it_should(train, video_options, capsys):
    whole = train(*video_options, name="whole")
    half = complete_checkpoints(whole)[0]
    rest = train(*video_options, f"--load={half}", name="rest")
    for part in ("model", "ema", "optimizer", "discriminator", "discriminator_optimizer"):
        left, right = tensors(whole, part), tensors(rest, part)
        assert left.keys() == right.keys()
        assert left
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    second = [e for e in entries(whole) if e["step"] > 4]
    assert [{**e, "samples_per_s": 0, "s_per_step": 0} for e in second] == [
        {**e, "samples_per_s": 0, "s_per_step": 0} for e in entries(rest)
    ]
    log = {e["step"]: e for e in entries(whole) if "loss" in e}
    assert "d_loss" not in log[2]  # the first two steps are without GAN
    assert {"d_loss", "g_loss", "g_scale", "lpips", "logvar", "psnr"} <= log[3].keys()
    assert log[8]["logvar"] != -1
    measured = [e for e in entries(whole) if "held_out_psnr" in e]
    assert [e["step"] for e in measured] == [4, 8]
    assert {"held_out_ssim", "held_out_lpips", "held_out_saturation"} <= measured[0].keys()
    with Image.open(whole / "held_out-000008.png") as sheet:
        assert sheet.width > sheet.height > 200  # five frames, two rows
    vae = DiffusersVideoVAE(str(whole / "vae"), posterior="mode").eval()
    assert vae.decode(vae.encode(torch.zeros(1, 3, 5, 16, 16)), num_frames=5).shape == (1, 3, 5, 16, 16)
    assert tensors(whole, "ema").keys() == vae.state_dict().keys()

    # the discriminator is not lost without a word
    without = [o for o in video_options if not o.startswith(("--disc", "{'type': 'Patch", "--adv"))]
    with pytest.raises(SystemExit):
        train(*without, f"--load={half}", name="without")
    assert "was written with a discriminator" in capsys.readouterr().err


def test_a_length_that_the_vae_does_not_take_is_refused(train, video_options, capsys):
    options = [option for option in video_options if option not in ("--mixed-lengths", "5", "1")]
    with pytest.raises(SystemExit):
        train(*options, "--mixed-lengths", "5", "3")
    assert "mixed_lengths: this VAE does not take 3 frames; the nearest is" in capsys.readouterr().err
