"""The linear codec is the best one; what is measured is what the table says; LPIPS and CSV."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from torch.testing import assert_close

from opensora.models.vae import DiffusersVideoVAE, VideoAutoencoderKL
from opensora.models.vae.metrics import Quality, psnr
from opensora.utils import logging
from opensora.utils.seed import generator
from tests.datasets.video.videos import CLIPS
from tests.models.vae.lpips_files import random_alex
from tools.eval_vae import by_source, fit_pca, judge, load_vae, main, picked, read_clips

TINY = {"block_out_channels": (8, 8), "norm_num_groups": 4, "mid_block_add_attention": False}
WAN = {
    "type": "AutoencoderKLWan", "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1,
    "temperal_downsample": [True], "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
    "latents_mean": None, "latents_std": None,
}  # fmt: skip


def videos(count, seed=0, size=(2, 16, 24)):
    return [torch.rand(3, *size, generator=generator(seed, i)) * 2 - 1 for i in range(count)]


def patches(video):
    return rearrange(video, "C T (h p) (w q) -> (T h w) (C p q)", p=4, q=4)


def test_pca_equals_a_truncated_svd():
    codec = fit_pca(videos(4), channels=5, patch=4)
    all_patches = torch.cat([patches(v) for v in videos(4)])
    u, s, v = torch.linalg.svd(all_patches - all_patches.mean(0), full_matrices=False)
    expected = ((u[:, :5] * s[:5]) @ v[:5] + all_patches.mean(0)).clamp(-1, 1)
    assert_close(torch.cat([patches(codec(v)) for v in videos(4)]), expected, rtol=1e-4, atol=1e-4)


def test_all_channels_lose_nothing_and_more_channels_lose_less():
    train = videos(20)
    other = videos(1, seed=1)[0]
    assert float(psnr(fit_pca(train, channels=192)(other)[None], other[None])) > 90
    values = [float(psnr(fit_pca(train, channels=c)(train[0])[None], train[0][None])) for c in (1, 4, 16)]
    assert values == sorted(values)


def test_the_gate():
    assert judge(Quality(26.0, 0.9, 0.1, 0.95), 23.4) == 0
    assert judge(Quality(25.8, 0.9, 0.1, 0.95), 23.4) == 1
    assert judge(Quality(26.0, 0.9, 0.1, 0.90), 23.4) == 1


@pytest.fixture
def run(monkeypatch):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eval_vae", *map(str, words), "--device", "cpu"])
        main()

    return run


@pytest.fixture(scope="module")
def lpips(tmp_path_factory):
    return random_alex(tmp_path_factory.mktemp("lpips") / "alex.safetensors")


def test_images_beside_a_linear_codec(run, tmp_path, capsys, lpips, monkeypatch):
    monkeypatch.setattr(logging, "LINE_S", 0.0)
    torch.manual_seed(0)
    VideoAutoencoderKL(architecture=TINY).save_pretrained(tmp_path / "vae", dtype="fp16")
    rows = ["path,source"]
    for i, size in enumerate([(34, 40), (37, 53), (44, 44)]):
        pixels = np.random.default_rng(i).integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{'noise' if i else 'first'}")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(rows))
    jsonl = tmp_path / "table.jsonl"
    jsonl.write_text(
        "".join(json.dumps(dict(zip(rows[0].split(","), row.split(","), strict=True))) + "\n" for row in rows[1:])
    )
    command = ["--vae", tmp_path / "vae", "--data-path", table, "--train-path", table, "--lpips", lpips]
    with pytest.raises(SystemExit) as stop:
        run(*command, "--sheet", tmp_path / "sheet.png", "--csv", tmp_path / "out" / "vae.csv")
    out, err = capsys.readouterr()
    assert stop.value.code == 1  # untrained
    assert f"loading the VAE {tmp_path / 'vae'}" in err
    assert f"reading {table}: 3/3 clip, 00:00 so far" in err
    assert "measuring: 3/3 clip, 00:00 so far" in err
    assert "first (1)" in out
    assert "noise (2)" in out
    assert "gate MISSED" in out
    with Image.open(tmp_path / "sheet.png") as grid:
        assert grid.height == 2 * (3 * 128 + 4)
    with (tmp_path / "out" / "vae.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["path"] for row in written] == ["0.png", "1.png", "2.png", "mean over sources"]
    for name in ("psnr", "ssim", "lpips", "saturation", "linear_psnr"):
        first, second, third, mean = (float(row[name]) for row in written)
        assert mean == pytest.approx((first + (second + third) / 2) / 2, rel=1e-4)
    vae = load_vae(str(tmp_path / "vae"))
    same = [[(clip.name, clip.source) for clip in read_clips(path, None, vae, 1)] for path in (table, jsonl)]
    assert same[0] == same[1] == [("0.png", "first"), ("1.png", "noise"), ("2.png", "noise")]


@pytest.mark.slow
def test_videos_of_a_temporal_vae(run, tmp_path, capsys):
    torch.manual_seed(0)
    DiffusersVideoVAE(architecture=WAN).save_pretrained(tmp_path / "vae")
    table = tmp_path / "table.csv"
    table.write_text(f"path\n{CLIPS / 'white_dog.mp4'}\n")
    run(
        "--vae",
        tmp_path / "vae",
        "--data-path",
        table,
        "--num-frames",
        8,
        "--lpips",
        "none",
        "--csv",
        tmp_path / "v.csv",
    )
    assert "LPIPS" not in capsys.readouterr().out
    vae = DiffusersVideoVAE(str(tmp_path / "vae"), posterior="mode")
    clip = next(read_clips(table, None, vae, 8))
    assert clip.video.shape == (3, 5, 180, 320)
    with torch.no_grad():
        x_hat = vae.decode(vae.encode(clip.video[None]), num_frames=5).clamp(-1, 1)
    error = (x_hat[0] - clip.video).double().square().mean()
    with (tmp_path / "v.csv").open() as file:
        measured = float(next(csv.DictReader(file))["psnr"])
    assert measured == pytest.approx(float(10 * torch.log10(4 / error)), abs=1e-3)


def test_mistakes_are_told(run, tmp_path, capsys):
    VideoAutoencoderKL(architecture=TINY).save_pretrained(tmp_path / "vae")
    with pytest.raises(SystemExit) as stop:
        run("--vae", tmp_path / "vae", "--data-path", tmp_path / "none.csv", "--lpips", "none")
    assert stop.value.code == 2
    assert "none.csv does not exist" in capsys.readouterr().err


def test_a_source_with_many_clips_does_not_decide():
    from tools.eval_vae import Measured

    rows = [Measured(str(i), "a", Quality(20.0, 0.5, 0.2, 1.0), 10.0, ()) for i in range(9)]
    rows.append(Measured("9", "b", Quality(40.0, 0.7, 0.4, 0.8), 20.0, ()))
    mean, linear = by_source(rows)["mean over sources"]
    assert mean == pytest.approx((30.0, 0.6, 0.3, 0.9))
    assert linear == 15.0


def test_clips_of_a_source_are_evenly_picked():
    clips = [SimpleNamespace(source=source, number=i) for source in "ab" for i in range(11)]
    chosen = [clip.number for clip in picked(clips, 6) if clip.source == "b"]
    assert chosen == [0, 1, 3, 5, 7, 9]
    assert len(picked(clips, 20)) == len(picked(clips, None)) == 22


def test_a_number_of_clips_is_at_least_one(run, capsys):
    with pytest.raises(SystemExit):
        run("--vae", "none", "--data-path", "none.csv", "--lpips", "none", "--per-source", "0")
    assert "--per-source 0: it must be at least 1" in capsys.readouterr().err
