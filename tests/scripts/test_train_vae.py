"""scripts/train_vae.py end to end at toy size: what it leaves, exact resume, user errors; and tools/eval_vae on it."""

import importlib.util
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
from opensora.config.schema import LoopConfig, VAETrainConfig, schema_fields
from opensora.datasets.datasets import VideoTextDataset
from opensora.models.vae import DiffusersVideoVAE, VideoAutoencoderKL, VideoAutoencoderPipeline
from opensora.registry import DATASETS
from opensora.training.run import RunState
from opensora.utils.errors import UserError
from tests.conftest import start_ranks
from tests.models.vae.lpips_files import random_alex
from tests.scripts.conftest import free_ports

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A table of ten smooth coloured images of two sources."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    rows = ["path,source"]
    for i in range(10):
        colours = Image.fromarray(rng.integers(0, 255, (3, 4, 3), dtype=np.uint8))
        colours.resize((52, 40), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
        rows.append(f"{i}.png,{'even' if i % 2 == 0 else 'odd'}")
    (folder / "images.csv").write_text("\n".join(rows) + "\n")
    return folder / "images.csv"


@pytest.fixture(scope="module")
def config(tmp_path_factory, images) -> Path:
    path = tmp_path_factory.mktemp("config") / "toy_vae.py"
    path.write_text(
        f'''"""Toy."""
data_path = {str(images)!r}
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
def script() -> ModuleType:
    return load_script()


def load_script() -> ModuleType:
    """scripts/train_vae.py as a module."""
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_accumulation_equals_the_large_batch(train):
    gan = ("--discriminator", "{'type': 'PatchDiscriminator', 'dims': 2, 'channels': 8, 'num_layers': 1}")
    once = ("--max-steps=1", "--ckpt-every=0", "--adversarial-scale=fixed")
    large = train(*gan, *once, name="large")
    small = train(*gan, *once, "--batch-size=2", "--accumulation-steps=2", name="small")
    for name in ("loss", "g_loss", "d_loss", "grad_norm"):
        assert entries(small)[0][name] == pytest.approx(entries(large)[0][name], rel=1e-4), name
    moments = [tensors(run, "discriminator_optimizer") for run in (large, small)]
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


def test_the_discriminator_has_its_own_learning_rate_on_the_same_schedule(train, script, monkeypatch):
    built, build = [], script.build_adversarial_loss
    monkeypatch.setattr(script, "build_adversarial_loss", lambda *args: built.append(build(*args)) or built[-1])
    train(
        "--discriminator", "{'type': 'PatchDiscriminator', 'dims': 2, 'channels': 8, 'num_layers': 1}",
        "--discriminator-lr=1e-3", "--adversarial-start=1", "--adversarial-weight=0.25", "--max-steps=2", "--ckpt-every=0",
    )  # fmt: skip
    (adversarial,) = built
    assert adversarial.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 2 / 3)  # the second step of the warm-up
    assert (adversarial.start, adversarial.weight) == (1, 0.25)


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


PIPELINE = {
    "type": "VideoAutoencoderPipeline",
    "vae_2d": {
        "type": "VideoAutoencoderKL",
        "architecture": {
            "block_out_channels": [8, 8], "layers_per_block": 1, "mid_block_add_attention": False, "norm_num_groups": 4
        },
    },
    "vae_temporal": {"type": "VAE_Temporal_SD", "filters": 8, "num_res_blocks": 1, "num_groups": 4},
    "micro_frame_size": 5,
}  # fmt: skip


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_vae_of_two_parts_leaves_one_that_loads(train, monkeypatch, per_channel):
    monkeypatch.setattr("opensora.training.vae.LatentStatistics.per_channel", per_channel)
    run = train("--vae", str(PIPELINE), "--max-steps=2", "--ckpt-every=2", "--warmup-steps=1")
    vae = VideoAutoencoderPipeline(from_pretrained=str(run / "vae"), posterior="mode")
    ema = tensors(run, "ema")
    for name, weight in vae.state_dict().items():
        assert torch.equal(weight, ema[name].half().float()), name
    assert vae.micro_frame_size == 5
    assert (len(vae.scaling_factor.unique()) > 1) == per_channel
    assert not torch.equal(vae.scaling_factor, torch.ones(4))


@pytest.mark.parametrize(
    ("vae", "options", "message"),
    [
        (PIPELINE, ["--compile=True"], "compile=True: for VAEs of one network"),
        (PIPELINE, ["--trained=decoder", "--loss.kl=0"], "trained='decoder': for VAEs of one network"),
        (PIPELINE["vae_temporal"], [], "vae.type='VAE_Temporal_SD' has no save_pretrained"),
    ],
)
def test_a_vae_that_cannot_be_trained_so_is_refused_at_once(train, tmp_path, capsys, vae, options, message):
    with pytest.raises(SystemExit) as stop:
        train("--vae", str(vae), *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class OneBadPicture(VideoTextDataset):
    """An image of the table has a pixel that is NaN."""

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
    assert "--on-nonfinite skip continues" in said
    for path in complete_checkpoints(tmp_path / "run"):
        assert all(bool(t.isfinite().all()) for part in ("model", "ema", "optimizer")
                   for t in open_checkpoint(path).tensors(part).values())  # fmt: skip


@pytest.mark.slow
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


def ends_with(run, capsys) -> str:
    """What a run says that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 2
    return capsys.readouterr().err


def table_with_bad_rows(images: Path, folder: Path, *bad: int) -> Path:
    """A copy of the images and their table, in which these rows' files are cut off."""
    shutil.copytree(images.parent, folder)
    for row in bad:
        path = folder / f"{row}.png"
        path.write_bytes(path.read_bytes()[:-200])
    return folder / images.name


class TestTheEndOfARun:
    """`vae/` is there, and whole, or can still be had."""

    def test_a_file_that_cannot_be_read_costs_its_own_sample_only(self, train, images, tmp_path, capsys):
        """With either policy: with "error" one that the few steps of training have not met."""
        table = table_with_bad_rows(images, tmp_path / "bad", 3)
        report = "1 of 10 samples cannot be read, and the statistics of the latents leave them out"
        run = train(f"--data-path={table}", "--max-steps=4", "--dataset.max-bad-share=0.5")
        assert VideoAutoencoderKL(str(run / "vae")).out_channels == 4
        said = capsys.readouterr().err
        assert report in said
        assert "3.png" in said.partition(report)[2]
        run = train(
            f"--data-path={table}", "--max-steps=1", "--batch-size=1", "--dataset.bad-files=error", "--warmup-steps=0",
            name="strict",
        )  # fmt: skip
        assert (run / "vae" / "config.json").is_file()

    def test_where_most_files_cannot_be_read_it_says_so_and_can_be_repeated(self, train, images, tmp_path, capsys):
        table = table_with_bad_rows(images, tmp_path / "bad", *range(6))
        options = (f"--data-path={table}", "--max-steps=1", "--dataset.max-bad-share=1")
        said = ends_with(lambda: train(*options), capsys)
        assert "6 of 10 samples" in said
        assert "--load latest" in said
        assert not (tmp_path / "run" / "vae").exists()
        for row in range(6):
            shutil.copy(images.parent / f"{row}.png", table.parent)
        assert (train(*options, "--load=latest") / "vae" / "config.json").is_file()

    @pytest.mark.slow
    def test_a_missing_export_is_all_that_a_resume_of_a_finished_run_makes(self, train, tmp_path, monkeypatch, capsys):
        def full_disk(vae, folder, dtype):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("half of it")
            raise UserError("No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(VideoAutoencoderKL, "save_pretrained", full_disk)
            assert "No space left" in ends_with(train, capsys)
        (first, last), whole = complete_checkpoints(tmp_path / "run"), train(name="whole")
        run = train("--load=latest")
        assert complete_checkpoints(run) == [first, last]
        assert [entry["step"] for entry in entries(run)] == list(range(1, 9))
        assert "only the export is left" in (run / "log.txt").read_text()
        assert sorted(path.name for path in run.iterdir() if path.name.startswith((".", "vae"))) == [".lock", "vae"]
        fingerprints = {VideoAutoencoderKL(str(one / "vae")).fingerprint() for one in (whole, run)}
        assert len(fingerprints) == 1
        # and once it is there, there is nothing left to do: in this folder, or in another
        assert "nothing to train" in ends_with(lambda: train("--load=latest"), capsys)
        assert "nothing to train" in ends_with(lambda: train(f"--load={last}", name="new"), capsys)

    def test_a_checkpoint_of_a_run_without_vae_is_exported_into_a_new_run(self, train):
        whole = train()
        shutil.rmtree(whole / "vae")
        again = train(f"--load={complete_checkpoints(whole)[-1]}", name="again")
        assert (again / "vae" / "config.json").is_file()

    @pytest.mark.slow
    def test_the_vae_of_fewer_steps_is_not_taken_for_that_of_a_longer_run(self, train, monkeypatch, capsys):
        run = train("--max-steps=4")
        short = VideoAutoencoderKL(str(run / "vae")).fingerprint()
        with monkeypatch.context() as broken:
            broken.setattr(VideoAutoencoderKL, "save_pretrained", no_disk)
            ends_with(lambda: train("--load=latest"), capsys)
        assert VideoAutoencoderKL(str(run / "vae")).fingerprint() == short
        train("--load=latest")
        assert VideoAutoencoderKL(str(run / "vae")).fingerprint() != short
        assert "nothing to train" in ends_with(lambda: train("--load=latest"), capsys)


def no_disk(vae, folder, dtype):
    raise UserError("No space left on device")


class TestResumeWithOtherData:
    @pytest.mark.slow
    def test_it_is_refused_with_advice_that_works(self, train, images, tmp_path, capsys):
        load = f"--load={complete_checkpoints(train('--max-steps=4'))[-1]}"
        said = ends_with(lambda: train(load, "--batch-size=5", name="refused"), capsys)
        assert "batch_size x ranks was 4, now 5" in said
        assert "--other-data next_epoch" in said
        assert "--start-from-scratch True" in said
        fewer = tmp_path / "fewer.csv"
        rows = images.read_text().splitlines()[:9]
        fewer.write_text("\n".join([rows[0], *(str(images.parent / row) for row in rows[1:])]) + "\n")
        for name, options in {"batch": ("--batch-size=5",), "data": (f"--data-path={fewer}",)}.items():
            rest = train(load, *options, "--other-data=next_epoch", name=name)
            assert [entry["step"] for entry in entries(rest)] == [5, 6, 7, 8]
            # 4 steps of 3 batches an epoch end in epoch 1, and epoch 2 begins; now 2 batches are an epoch
            assert [entry["epoch"] for entry in entries(rest)] == [2, 3, 3, 4]

    @pytest.mark.slow
    def test_from_scratch_keeps_weights_average_and_optimizers(self, train):
        gan = ("--discriminator", "{'type': 'PatchDiscriminator', 'dims': 2, 'channels': 8, 'num_layers': 1}")
        first = train(*gan, "--max-steps=4", name="first")
        load = f"--load={complete_checkpoints(first)[-1]}"
        short = ("--max-steps=1", "--lr=1e-9", "--discriminator-lr=1e-9", "--warmup-steps=0")
        again = train(*gan, load, "--batch-size=5", "--start-from-scratch=True", *short, name="again")
        assert complete_checkpoints(again)[-1].name == "epoch0-global_step1"
        weights, ema = tensors(first, "model"), tensors(first, "ema")
        fifth = {name: torch.lerp(ema[name], weights[f"vae.{name}"], 1 - (1 + 5) / (10 + 5)) for name in ema}
        before = {"model": weights, "ema": fifth, "discriminator": tensors(first, "discriminator")}
        for part, left in before.items():
            right = tensors(again, part)
            for name, value in left.items():
                torch.testing.assert_close(value, right[name], rtol=0, atol=1e-6)
        for part in ("optimizer", "discriminator_optimizer"):
            steps = {int(value) for name, value in tensors(again, part).items() if name.endswith("/step")}
            assert steps == {5}, part

    @pytest.mark.parametrize("option", ["--other-data=next_epoch", "--start-from-scratch=True"])
    def test_neither_is_ignored_without_load(self, train, capsys, option):
        assert "has no effect without load" in ends_with(lambda: train(option), capsys)

    def test_every_option_that_the_refusal_names_is_one_of_every_training_script(self):
        with pytest.raises(UserError) as refused:
            RunState("xyz", 8).resumed({"data": "abc", "global_batch": 8, "step": 1, "micro_batch": 1, "epoch": 0}, "c")
        named = {option.replace("-", "_") for option in re.findall(r"--([a-z-]+)", str(refused.value))}
        assert named
        for schema in (VAETrainConfig, *LoopConfig.__subclasses__()):
            assert named <= schema_fields(schema).keys(), schema


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.nightly
def test_a_measurement_longer_than_a_step_may_take_does_not_end_the_other_processes(config, images, tmp_path):
    options = ["--max-steps=4", "--ckpt-every=0", "--batch-size=2", "--eval-every=2", f"--eval-data-path={images}"]
    # 6 s; the steps take milliseconds, and process 1 is in the next one's all-reduce while process 0 measures
    argv = [str(config), f"--outputs={tmp_path}", "--exp-name=run", "--step-timeout-min=0.1", *options]
    start_ranks(_measure_slowly, (free_ports(1)[0], argv), 2, "scripts/train_vae.py", 120)
    assert [e["step"] for e in entries(tmp_path / "run") if "held_out_psnr" in e] == [2, 4]
    assert (tmp_path / "run" / "vae" / "config.json").is_file()


def _measure_slowly(rank: int, port: int, argv: list[str]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()})
    script = load_script()
    reconstruct, waits = script.reconstruct, iter([8.0])

    def slow(vae, x):
        time.sleep(next(waits, 0))
        return reconstruct(vae, x)

    script.reconstruct = slow
    sys.argv = ["train_vae.py", *argv]
    script.main()


@pytest.fixture(scope="module")
def video_options(tmp_path_factory, images) -> list[str]:
    """A causal video VAE on real clips and images, with all that can be switched on."""
    folder = tmp_path_factory.mktemp("video")
    clips = ROOT / "assets/clips"
    rows = "".join(f"{clips / name}\n" for name in ("white_dog.mp4", "cup_portrait.mp4"))
    (folder / "train.csv").write_text(f"path\n{rows}{images.parent / '0.png'}\n")
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


@pytest.mark.nightly
@pytest.mark.slow
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
