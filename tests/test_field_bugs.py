"""tests/field_bugs.md tells the truth; and the bugs of that list that have no better place for their test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opensora.datasets.cache.records import RecordReader, RecordWriter
from opensora.models.text_encoder.condition import TextCondition
from opensora.schedulers.training import frame_mean
from opensora.training.batch_encoder import drop_text
from opensora.utils.seed import generators

ROOT = Path(__file__).resolve().parent.parent
DOC = (ROOT / "tests" / "field_bugs.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", DOC)))


def test_every_row_names_a_test_or_a_reason():
    rows = [
        line.split(" | ")
        for line in DOC.splitlines()
        if line.startswith("|") and not line.startswith(("| report", "|---"))
    ]
    assert len(rows) >= 43
    for row in rows:
        assert len(row) == 3, row
        assert "`tests/" in row[2], row


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda value: str(value).rpartition("/")[2])
def test_every_test_that_it_names_exists(file, test):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not test or re.search(rf"^\s*def {test}\(", text, re.MULTILINE), f"{file} has no {test}"


def test_a_mask_that_leaves_nothing_to_learn():
    """All frames are given: the loss is 0 and so is its gradient; never 0 / 0."""
    x = torch.randn(2, 4, 3, 5, 5, requires_grad=True)
    loss = frame_mean(x**2, torch.zeros(2, 3, dtype=torch.bool))
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert x.grad is not None
    assert not x.grad.any()
    one = frame_mean(x**2, torch.tensor([[True, False, False]] * 2))
    torch.testing.assert_close(one, (x[:, :, 0] ** 2).mean((1, 2, 3)))


class Dropping:
    """What `drop_text` asks of a denoiser."""

    def __init__(self, class_dropout_prob: float) -> None:
        self.class_dropout_prob = class_dropout_prob

    def null_condition(self, batch: int) -> torch.Tensor:
        return torch.full((batch, 1, 5, 3), -1.0)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_all_text_or_none_is_dropped(probability):
    text = TextCondition(torch.randn(4, 1, 5, 3), torch.ones(4, 5, dtype=torch.bool))
    dropped = drop_text(text, Dropping(probability), generators(0, "drop", ids=range(4)))
    assert torch.equal(dropped.y, text.y if probability == 0 else torch.full((4, 1, 5, 3), -1.0))
    assert torch.equal(dropped.mask, text.mask)


def test_captions_that_are_no_file_names(tmp_path):
    captions = ["a lake / a river\nand a \\ mountain", "a lake", "../../etc", "", "x" * 5000, "湖 🎬", "a\0b"]
    with RecordWriter(tmp_path / "text", {"number": "int64"}) as writer:
        for number, caption in enumerate(captions):
            writer.write({"number": number}, caption)
    reader = RecordReader(tmp_path / "text")
    assert [reader.read(caption)["number"] for caption in captions] == list(range(len(captions)))
    assert "a lake / a river" not in reader


@pytest.mark.nightly
@pytest.mark.slow
def test_reading_videos_needs_no_torchvision():
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "from opensora.datasets.video.read_video import probe, read_frames\n"
        f"assert read_frames({str(ROOT / 'assets/clips/white_dog.mp4')!r}, 3, 2).shape[0] == 2"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
