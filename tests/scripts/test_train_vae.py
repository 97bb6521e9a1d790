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

from opensora.models.vae import VideoAutoencoderKL
from opensora.utils.ckpt import complete_checkpoints, open_checkpoint

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
        (["--loss.lpips=0.1"], "loss.lpips=0.1"),
        (["--vae.architecture.latent_chanels=3"], "Did you mean 'latent_channels'"),
    ],
)
def test_mistakes_end_with_exit_code_2_before_a_run_is_made(train, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        train(*options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
