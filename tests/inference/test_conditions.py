"""What guidance steers away from: the model's own "no text", negative prompts, and "" where the model has none of its own."""

import pytest
import torch
from safetensors.torch import save_file

from opensora.inference import text
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.text import condition, null_condition
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import SCHEDULERS
from opensora.training.batch_encoder import drop_text
from opensora.utils.errors import UserError
from tests.models.denoisers import C_TEXT, L, build

OF_DIFFUSERS = ["PixArt", "PixArtMS", "PixArt-Sigma", "LatteT2V"]
CPU = torch.device("cpu")


class Words:
    """A token for each word and one for the end; features depend on the whole text, those of padding too."""

    output_dim, model_max_length = C_TEXT, L

    def __init__(self, *, padding: bool = True, knows_empty: bool = True) -> None:
        self.padding, self.knows_empty = padding, knows_empty

    def encode(self, texts):
        if "" in texts and not self.knows_empty:
            raise UserError("'' is not in the text cache.")
        y = torch.stack([torch.randn(1, L, C_TEXT, generator=torch.Generator().manual_seed(len(t))) for t in texts])
        mask = torch.arange(L)[None] < torch.tensor([[len(t.split()) + 1] for t in texts])
        return TextCondition(y if self.padding else y * mask[:, None, :, None], mask)


@pytest.fixture(autouse=True)
def nothing_logged():
    text._log_once.cache_clear()


@pytest.fixture
def from_diffusers(tmp_path):
    """A family's toy model with weights of diffusers, which have no table of "no text"."""

    def make(family, **changes):
        source = build(family, **({} if family == "LatteT2V" else {"no_temporal_pos_emb": True}), **changes)
        save_file(source.to_diffusers()[1], tmp_path / "w.safetensors")
        return build(family, **changes, from_pretrained=str(tmp_path / "w.safetensors"))

    return make


PROMPTS = ["a dog", "a city street at night"]  # 3 and 6 tokens


def steered_from(model, negatives, encoder=None):
    encoder = encoder or Words()
    return null_condition(model, encoder, condition(encoder, PROMPTS, {}, CPU), negatives)


def test_a_models_own_no_text_takes_the_captions_mask():
    model = build("PixArt")
    null = steered_from(model, [None, None])
    assert null.keys() == {"y"}
    assert torch.equal(null["y"], model.null_condition(2))


@pytest.mark.parametrize("family", OF_DIFFUSERS)
def test_weights_without_no_text_get_an_empty_prompt(from_diffusers, family, caplog):
    model = from_diffusers(family)
    with caplog.at_level("INFO"):
        null = steered_from(model, [None, None])
        again = steered_from(model, [None, None])
    assert caplog.text.count("guidance uses the encoding of an empty prompt, as diffusers does") == 1
    empty = Words().encode(["", ""])
    assert torch.equal(null["y"], empty.y)
    captions = Words().encode(PROMPTS).mask
    assert torch.equal(null["mask"], captions if family == "LatteT2V" else empty.mask)
    assert all(torch.equal(null[name], again[name]) for name in null)


def test_latte_gets_the_empty_prompts_own_tokens_where_padding_has_no_features(from_diffusers):
    encoder = Words(padding=False)
    null = steered_from(from_diffusers("LatteT2V"), [None, None], encoder)
    assert null["mask"].sum(dim=1).tolist() == [1, 1]


@pytest.mark.parametrize("family", ["PixArt", "LatteT2V"])
def test_negative_prompts_with_empty_ones(from_diffusers, family):
    model = from_diffusers(family)
    null = steered_from(model, ["blurry", None])  # of fewer tokens than the captions
    given, empty = Words().encode(["blurry"]), steered_from(model, [None, None])
    assert torch.equal(null["y"], torch.cat([given.y, empty["y"][1:]]))
    assert torch.equal(null["mask"], torch.cat([given.mask, empty["mask"][1:]]))


def test_a_cache_without_the_empty_prompt_says_what_to_do(from_diffusers):
    model, cache = from_diffusers("PixArt"), Words(knows_empty=False)
    with pytest.raises(UserError, match=r"(?s)have no \"no text\" of their own.*not in the text cache.*--cfg-scale 1"):
        steered_from(model, [None, None], cache)
    assert steered_from(model, ["blurry", "blurry"], cache)["mask"].sum(dim=1).tolist() == [2, 2]


def test_training_that_drops_captions_makes_the_table_the_models_own(from_diffusers):
    model = from_diffusers("PixArt").train()
    model.null_condition(1)  # a new model is in train mode, and a look at its table teaches it nothing
    assert not torch.equal(steered_from(model, [None, None])["y"], model.null_condition(2))
    drop_text(Words().encode(PROMPTS), model, [torch.Generator().manual_seed(i) for i in range(2)])
    assert torch.equal(steered_from(model.eval(), [None, None])["y"], model.null_condition(2))


def test_a_sample_does_not_depend_on_the_table_that_the_weights_lack(from_diffusers, cfg):
    vae = VideoPipeline.from_config(cfg).vae
    scheduler = SCHEDULERS.build({"type": "iddpm", "num_sampling_steps": 2, "cfg_scale": 4.0})
    model = from_diffusers("PixArt")
    size = {"num_frames": 1, "image_size": (32, 48), "fps": 8, "seed": 1}
    pipeline = VideoPipeline(model, vae, Words(), scheduler)
    one = pipeline(["a dog"], **size)
    model.y_embedder.y_embedding.normal_()
    assert torch.equal(pipeline(["a dog"], **size), one)
    assert torch.equal(pipeline(["a dog"], negative_prompts="", **size), one)
