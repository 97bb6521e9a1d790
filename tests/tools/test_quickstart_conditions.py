"""The figures of tools/quickstart/conditions.py, on videos whose figures are known."""

import pytest
import torch

from opensora.models.vae.metrics import reconstruct
from opensora.utils.errors import UserError
from tests.models.vaes import build
from tools.quickstart.conditions import KINDS, describe, keep_weights, measured


def test_a_seamless_start_and_a_jump_are_told_apart(tmp_path):
    vae = build("VideoAutoencoderKL", posterior="mode")
    start = torch.rand(3, 2, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    kept = reconstruct(vae, start[None])[0]  # what a kept frame comes back as
    move = (kept[:, 1] - kept[:, 0]).abs().mean()
    smooth = torch.stack([kept[:, 0], kept[:, 1], *(kept[:, 1] + i * move for i in range(1, 4))], dim=1)
    jump = torch.cat([kept, smooth[:, 2:] + 4 * move], dim=1)
    figures = [{"clip": "a.mp4", "kind": kind.name, **measured(video, given, vae)} for kind, video, given in (
        (KINDS[0], smooth, None),
        (KINDS[2], smooth, start),
        (KINDS[2], jump, start),
    )]  # fmt: skip
    assert figures[0]["step"] is None
    assert figures[1]["given_psnr"] > 60
    torch.testing.assert_close(figures[1]["step"], 1.0, atol=1e-3, rtol=0)
    torch.testing.assert_close(figures[2]["step"], 5.0, atol=1e-2, rtol=0)
    assert "| a.mp4 | extension |" in describe(figures, tmp_path)
    assert "| a.mp4 | text to video | - | - |" in describe(figures, tmp_path)


def test_samples_of_other_weights_are_not_in_the_way(tmp_path):
    keep_weights(tmp_path / "new" / "folder", [])
    keep_weights(tmp_path / "new" / "folder", [])
    with pytest.raises(
        UserError, match=r"folder has samples of other weights \(the shipped ones\): pass another --out"
    ):
        keep_weights(tmp_path / "new" / "folder", ["--ckpt-path=mine"])
    keep_weights(tmp_path / "mine", ["--ckpt-path=mine"])
    with pytest.raises(UserError, match=r"\(--ckpt-path=mine\)"):
        keep_weights(tmp_path / "mine", [])
