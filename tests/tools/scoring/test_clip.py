"""Aesthetic score and matching, with a small CLIP of random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import BertTokenizerFast, CLIPConfig, CLIPModel

from opensora.utils.errors import UserError
from tools.eval.text_similarity import Clip
from tools.scoring.clip import pixels_of, prepared
from tools.scoring.frames import KEY_POINTS
from tools.scoring.registry import scorer

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
PATHS = [CLIPS / "white_dog.mp4", CLIPS / "missing.mp4", CLIPS / "city_teal.mp4"]
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "white", "dog", "city"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    text = {**TOWER, "vocab_size": len(WORDS), "max_position_embeddings": 12, "eos_token_id": 3, "bos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**TOWER, "image_size": 32, "patch_size": 8}, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    names = ["input_ids", "attention_mask"]  # CLIP takes no others
    BertTokenizerFast(str(folder / "vocab.txt"), model_input_names=names).save_pretrained(folder)
    return str(folder)


def test_matching_is_the_cosine_of_each_clip_with_its_own_caption(clip_folder):
    texts = ["a white dog", "a city", ""]
    dog, missing, without = scorer("matching", model=clip_folder).score(PATHS, text=texts)
    clip = Clip(clip_folder)
    image, text = clip.embed_images(pixels_of(clip, PATHS[0], (0.5,))), clip.embed_texts(["a white dog"])
    assert dog["match"] == pytest.approx(100 * float(F.cosine_similarity(image, text)), abs=1e-3)
    assert missing["match"] is None
    assert "missing.mp4" in missing["error"]
    assert without == {"match": None}


@pytest.mark.parametrize("prefix", ["layers.", ""])
def test_aesthetic_is_the_heads_linear_layers_on_unit_embeddings(clip_folder, tmp_path, prefix):
    torch.manual_seed(1)
    if prefix:  # as LAION's five layers are stored: dropouts between them have numbers too
        layers = {0: torch.nn.Linear(8, 6), 2: torch.nn.Linear(6, 4), 10: torch.nn.Linear(4, 1)}
        state = {f"layers.{n}.{k}": v for n, layer in layers.items() for k, v in layer.state_dict().items()}
        file = tmp_path / "head.pth"
        torch.save(state, file)
    else:
        layers = {0: torch.nn.Linear(8, 1)}
        file = tmp_path / "head.safetensors"
        save_file(layers[0].state_dict(), file)
    rows = scorer("aesthetic", model=clip_folder, head=str(file)).score(PATHS)
    clip = Clip(clip_folder)
    for path, row in zip(PATHS[::2], rows[::2], strict=True):
        x = F.normalize(clip.embed_images(pixels_of(clip, path, KEY_POINTS)), dim=-1)
        assert row["aes"] == pytest.approx(torch.nn.Sequential(*layers.values())(x).mean().item(), abs=1e-4)
    assert rows[1]["aes"] is None


def test_sixteen_bits_change_the_third_digit_at_most(clip_folder, tmp_path):
    save_file(torch.nn.Linear(8, 1).state_dict(), tmp_path / "head.safetensors")
    of = {"aesthetic": {"head": str(tmp_path / "head.safetensors")}, "matching": {}}
    for name, settings in of.items():
        exact, half = (
            scorer(name, model=clip_folder, dtype=dtype, **settings).score(PATHS[::2], text=["a dog", "a city"])
            for dtype in ("float32", "float16")
        )
        column = "aes" if name == "aesthetic" else "match"
        assert [row[column] for row in exact] != [row[column] for row in half]
        assert [row[column] for row in half] == pytest.approx([row[column] for row in exact], rel=1e-2, abs=0.2)
        assert scorer(name, model=clip_folder, **settings).score(PATHS[::2], text=["a dog", "a city"]) == exact
    with pytest.raises(UserError, match="one of auto, float32, bfloat16, float16"):
        scorer("matching", model=clip_folder, dtype="fp8").score(PATHS, text=["a"] * 3)


def test_embeddings_that_overflow_are_refused(clip_folder):
    clip = Clip(clip_folder, dtype=torch.float16)
    weight = clip.model.visual_projection.weight
    weight.copy_(
        6e4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).sign()
    )  # float16 ends at 65504
    with pytest.raises(UserError, match=r"float16 are not finite; .*dtype=float32"):
        clip.embed_images(pixels_of(clip, PATHS[0], (0.5,)))


@pytest.mark.gpu
def test_a_gpu_prepares_frames_as_a_cpu_does(clip_folder):
    frames = list(np.random.default_rng(0).integers(0, 256, (2, 180, 320, 3), dtype=np.uint8))
    on_gpu = prepared(Clip(clip_folder, "cuda", torch.float16), frames)
    assert on_gpu.device.type == "cuda"
    torch.testing.assert_close(on_gpu.cpu(), prepared(Clip(clip_folder), frames), atol=1e-4, rtol=0)


def test_what_is_missing_is_named(clip_folder, tmp_path):
    for name in ("aesthetic", "matching"):
        with pytest.raises(UserError, match=f"--set {name}.model"):
            scorer(name).score(PATHS, text=["a"] * 3)
    torch.save(torch.nn.Linear(768, 1).state_dict(), tmp_path / "l14.pth")
    with pytest.raises(UserError, match=r"width 8.*\(1, 768\).*ViT-L/14 has width 768"):
        scorer("aesthetic", model=clip_folder, head=str(tmp_path / "l14.pth")).score(PATHS)
    with pytest.raises(UserError, match="no file"):
        scorer("aesthetic", model=clip_folder, head=str(tmp_path / "none.pth")).score(PATHS)
