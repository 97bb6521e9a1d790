"""docs/own-parts.md: parts of all kinds in files of the user's, their contracts, and a run made of them alone."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from opensora import contracts
from opensora.acceleration.sequence_parallel import check_sequence_parallel
from opensora.acceleration.step_cache import build_step_cache
from opensora.inference.pipeline import VideoPipeline
from opensora.training.lora import target_names
from opensora.utils.errors import UserError
from tests.scripts.conftest import load_script

ROOT = Path(__file__).parents[2]
FOLDER = "docs/examples/own_parts"
PAGE = (ROOT / "docs/own-parts.md").read_text()
EXAMPLES = sorted(path.name for path in (ROOT / FOLDER).glob("own_*.py"))
IMPORTS = [f"{FOLDER}/{name}" for name in EXAMPLES]
KINDS = ("Denoiser", "VAE", "TextEncoder", "Scheduler", "Sampler", "Solver", "Dataset")


pytestmark = pytest.mark.usefixtures("forget_own_parts")


@pytest.fixture
def own():
    """A denoiser without the attentions of this package."""
    spec = importlib.util.spec_from_file_location("own_parts_in_a_test", f"{ROOT / FOLDER}/own_denoiser.py")
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    return parts.TokenMLP(in_channels=4, caption_channels=8)


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def lines(code: str) -> list[str]:
    return [line for line in code.splitlines() if line]


def test_what_needs_hooks_says_so(own):
    for kind in ("pab", "teacache"):
        with pytest.raises(UserError, match=f"step_cache.type='{kind}': the blocks of a TokenMLP have no `"):
            build_step_cache({"type": kind}, own)
    with pytest.raises(UserError, match=r"none of its layers is a self-attention of opensora\.models\.layers"):
        check_sequence_parallel(own, 2)
    with pytest.raises(UserError, match=r"TokenMLP has no linear layer inside of a module called attn.* It has: "):
        target_names(own, "attention")
    assert target_names(own, "all-linear")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_the_example_files(name):
    file = (ROOT / FOLDER / name).read_text().partition('"""\n\n')[2]
    assert lines(file) in [lines(block) for block in python_blocks()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_states_each_contract(kind):
    (row,) = re.findall(rf"^\| [\w, ]+ \| `{kind}` \| (.*) \| .* \|$", PAGE, re.MULTILINE)
    needed = contracts.members(getattr(contracts, kind)).items() - contracts.members(contracts.Module).items()
    assert {text.replace("`", "") for text in re.split(", (?=`)", row)} == {text for _, text in needed}


def test_the_page_fits_its_length():
    assert len(PAGE.splitlines()) <= 250


def test_the_test_of_the_page_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = [block for block in python_blocks() if "check_contract" in block]
    exec(compile(code, "docs/own-parts.md", "exec"), {})


def test_the_examples_train_resume_and_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = ["--dataset.num-clips=4", "--batch-size=2", "--num-frames=2", "--device=cpu", "--val-every=2"]
    options += ["--val-prompts=a white square", "--log-every=1", f"--outputs={tmp_path}", "--exp-name=own"]
    for more in (["--max-steps=1"], ["--max-steps=2", "--load=latest"]):
        monkeypatch.setattr(sys, "argv", ["train.py", f"{FOLDER}/train.py", *options, *more])
        load_script().main()
    log = (tmp_path / "own" / "log.txt").read_text()
    assert "failed" not in log
    assert (tmp_path / "own" / "validation" / "step2" / "sheet.jpg").exists()
    (checkpoint,) = (tmp_path / "own").glob("*global_step2")
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            patch.delitem(sys.modules, name)
        with pytest.raises(UserError, match=r"own_denoiser.py, .* which is code and is not run unasked"):
            VideoPipeline.from_pretrained(checkpoint, fps=8)
    pipeline = VideoPipeline.from_pretrained(checkpoint, fps=8, imports=IMPORTS, device="cpu")
    videos = pipeline(["a white square moves right", "a white square moves left"])
    assert videos.shape == (2, 3, 2, 32, 32)
    torch.testing.assert_close(pipeline(["a white square moves right"])[0], videos[0], atol=1e-4, rtol=0)
