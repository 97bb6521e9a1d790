"""The benchmark of scorers on a GPU runs at toy size, and its networks are those that it names."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel

from tools.benchmark import random_networks, scoring_gpu
from tools.caption.captioner import Captioner
from tools.caption.vision_language import VisionLanguageModel
from tools.scoring.aesthetic import head_layers

OPTIONS = "--size tiny --device cpu --clips 2 --frame 45 80 --new-tokens 4 --seconds 0.01 --caption-clips 2 1"


def table_of(printed, start):
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in printed.splitlines()]
    return [line for line in lines if line[0].startswith(start)]


@pytest.mark.slow
def test_it_prints_both_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scoring_gpu", *OPTIONS.split()])
    threads = torch.get_num_threads()
    scoring_gpu.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.startswith(f"`python -m tools.benchmark.scoring_gpu {OPTIONS}`, ")
    assert "not measured" not in printed
    rows = table_of(printed, ("aesthetic", "matching"))
    assert [row[:2] for row in rows] == [[n, d] for n in ("aesthetic", "matching") for d in ("float32", "float16")]
    for row in rows:
        assert all(float(cell) > 0 for cell in row[2:9])
        assert 0 < float(row[9]) < 1 if row[1] == "float16" else row[9] == "0"
    (flow,) = table_of(printed, "flow")
    assert float(flow[7]) > 0
    captions = table_of(printed, "tiny LLaVA")
    assert [row[1] for row in captions] == ["2", "1"]
    assert {row[2].split(" + ")[1] for row in captions} == {"4"}
    assert all(float(cell) > 0 for row in captions for cell in row[3:6])


def test_a_row_that_fails_does_not_end_the_others(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scoring_gpu", *OPTIONS.split(), "--only", "aesthetic", "matching"])
    monkeypatch.setitem(random_networks.HEAD, "tiny", (8, 2))  # scores are one number
    scoring_gpu.main()
    printed = capsys.readouterr().out
    assert "| aesthetic | not measured: UserError: " in printed
    assert len(table_of(printed, "matching")) == 2


def test_every_answer_has_the_number_of_tokens_that_was_asked_for():
    processor, model = random_networks.llava("tiny", scoring_gpu.captions(), "cpu", torch.float32, 7)
    describe = VisionLanguageModel(Captioner(model="llava", max_tokens=7, dtype="float32"), processor, model)
    steps = []
    model.lm_head.register_forward_hook(lambda *_: steps.append(0))
    frame = np.zeros((40, 40, 3), np.uint8)
    describe([[frame, frame], [frame, frame]], ["a dog runs", "a city"], 0)
    assert len(steps) == 7
    inputs = describe.inputs([[frame, frame]], ["a dog"])
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 2 * (28 // 14) ** 2


def test_sizes_are_those_of_the_published_networks(tmp_path):
    """OpenAI's ViT-L/14 has 427,616,513 weights, LLaVA 1.5 7B of transformers 7,063,427,072; LAION's head 927,969."""
    texts = scoring_gpu.captions()
    with torch.device("meta"):
        clip = CLIPModel(random_networks.clip_config("real", random_networks.tokenizer_of(texts, ends=True)))
    assert sum(weight.numel() for weight in clip.parameters()) == 427_616_513
    _, llava = random_networks.llava("real", texts, "meta", torch.bfloat16, 100)
    assert sum(weight.numel() for weight in llava.parameters()) == 7_063_427_072
    assert {weight.dtype for weight in llava.parameters()} == {torch.bfloat16}
    random_networks.write_head(tmp_path / "head.safetensors", "real")
    layers = head_layers(str(tmp_path / "head.safetensors"), 768, "cpu")
    assert sum(weight.numel() + bias.numel() for weight, bias in layers) == 927_969


@pytest.mark.slow
def test_pictures_are_read_where_there_is_no_pyav(tmp_path):
    frames = [Image.new("RGB", (32, 24), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "two.webp", save_all=True, append_images=frames[1:], duration=400)
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from pathlib import Path\n"
        "from tools.scoring.frames import key_frames\n"
        f"print([frame[0, 0].argmax() for frame in key_frames(Path({str(tmp_path / 'two.webp')!r}), (0, 1))])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stderr
    assert [int(digit) for digit in run.stdout if digit in "012"] == [0, 2]
