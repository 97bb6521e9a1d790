"""The linear codec is the best one; what is measured is what the table says."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from opensora.models.vae import VideoAutoencoderKL
from opensora.utils.seed import generator
from tools.eval_vae import Row, fit_pca, judge, main, pca_codec_psnr, psnr, saturation

TINY = {"block_out_channels": (8, 8), "norm_num_groups": 4, "mid_block_add_attention": False}


def pictures(count, seed=0, size=(16, 24)):
    return [torch.rand(3, *size, generator=generator(seed, i)) * 2 - 1 for i in range(count)]


def test_pca_equals_a_truncated_svd():
    codec = fit_pca(pictures(4), channels=5, patch=4)
    patches = torch.cat([p.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).reshape(-1, 48) for p in pictures(4)])
    centred = patches - patches.mean(0)
    u, s, v = torch.linalg.svd(centred, full_matrices=False)
    expected = (u[:, :5] * s[:5]) @ v[:5] + patches.mean(0)
    got = torch.cat(
        [codec(p).unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).reshape(-1, 48) for p in pictures(4)]
    )
    assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_all_channels_lose_nothing_and_more_channels_lose_less():
    train = pictures(20)
    assert pca_codec_psnr(train, pictures(2, seed=1), channels=192) > 90
    values = [pca_codec_psnr(train, train, channels=c) for c in (1, 4, 16)]
    assert values == sorted(values)


def test_psnr_and_saturation():
    x = torch.zeros(3, 8, 8)
    assert psnr(x + 0.2, x) == pytest.approx(20.0, abs=1e-4)  # 20 log10(2 / 0.2)
    assert saturation(x) == 0
    x[0], x[1] = 0.5, -0.25
    assert saturation(x) == pytest.approx(0.75)


def test_the_gate():
    assert judge(Row(26.0, 0.95, 23.4)) == 0
    assert judge(Row(25.8, 0.95, 23.4)) == 1
    assert judge(Row(26.0, 0.90, 23.4)) == 1


def test_the_command(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    VideoAutoencoderKL(architecture=TINY).save_pretrained(tmp_path / "vae", dtype="fp16")
    rows = ["path,source"]
    for i, size in enumerate([(30, 20), (17, 33), (24, 24)]):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (*size, 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.png"
        )
        rows.append(f"{i}.png,{'noise' if i else 'first'}")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    command = ["eval_vae", "--vae", tmp_path / "vae", "--data-path", tmp_path / "table.csv", "--device", "cpu"]
    command += ["--train-path", tmp_path / "table.csv", "--sheet", tmp_path / "sheet.png"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr().out
    assert stop.value.code == 1  # untrained
    assert "first (1)" in out
    assert "noise (2)" in out
    assert "gate MISSED" in out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.height == 2 * 164

    monkeypatch.setattr(
        sys, "argv", ["eval_vae", "--vae", str(tmp_path / "vae"), "--data-path", str(tmp_path / "none.csv")]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "there is no table" in capsys.readouterr().err
