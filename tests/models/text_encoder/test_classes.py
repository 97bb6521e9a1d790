"""Class numbers as prompts, through training and sampling of a class-conditional DiT."""

import pytest
import torch

from opensora.inference.pipeline import VideoPipeline
from opensora.models.text_encoder import ClassEncoder, MemoizedTextEncoder
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.registry import MODELS, SCHEDULERS
from opensora.training.batch_encoder import drop_text
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tests.models.denoisers import build


def test_numbers_become_classes():
    y, mask = ClassEncoder(num_classes=1000).encode(["0", " 207 ", "999"])
    assert y.shape == (3, 1, 1, 1)
    assert y.dtype == torch.int64
    assert y.flatten().tolist() == [0, 207, 999]
    assert mask.shape == (3, 1)
    assert mask.all()


@pytest.mark.parametrize("prompt", ["1000", "-1", "a dog", "", "1.0", "1e2"])
def test_what_is_no_class_is_named(prompt):
    with pytest.raises(UserError, match=f"prompt '{prompt}'.*0 to 999"):
        ClassEncoder(num_classes=1000).encode(["5", prompt])


def test_constructor():
    encoder = MODELS.build({"type": "classes", "num_classes": 10}, model_max_length=None)
    assert (encoder.output_dim, encoder.model_max_length, encoder.num_classes) == (1, 1, 10)
    with pytest.warns(UserWarning, match="model_max_length=77 has no effect"):
        ClassEncoder(10, model_max_length=77)
    with pytest.raises(ValueError, match="num_classes=0"):
        ClassEncoder(0)


def test_memoized_classes_are_the_same():
    encoder = ClassEncoder(10)
    memo = MemoizedTextEncoder(encoder)
    for texts in (["3", "4"], ["4", "9", "3"]):
        torch.testing.assert_close(memo.encode(texts), encoder.encode(texts))


def test_dropped_classes_become_no_class():
    model, text = build("DiT-class", class_dropout_prob=0.5), ClassEncoder(10).encode(["3"] * 64)
    dropped = drop_text(text, model, generators(0, "test", ids=range(64)))
    assert dropped.y.dtype == torch.int64
    assert 16 < (dropped.y == 10).sum() < 48
    assert set(dropped.y.flatten().tolist()) == {3, 10}


@pytest.mark.parametrize("family", ["DiT-class", "Latte-class", "Latte-unconditional"])
def test_training_loss_reaches_the_condition(family):
    model, text = build(family).train(), ClassEncoder(10).encode(["3", "7"])
    scheduler = SCHEDULERS.build({"type": "iddpm"})
    rngs = generators(0, "test", ids=[0, 1])
    loss = scheduler.training_losses(model, torch.randn(2, 4, 3, 4, 4), text._asdict(), generators=rngs)
    assert loss.shape == (2,)
    loss.sum().backward()
    if "class" in family:
        rows = model.y_embedder.embedding_table.weight.grad.abs().sum(dim=1).nonzero().flatten()
        assert rows.tolist() == [3, 7]


@pytest.mark.parametrize("family", ["DiT-class", "Latte-class", "Latte-unconditional"])
def test_three_guided_steps_from_class_numbers_to_pixels(family):
    torch.manual_seed(0)
    vae = VideoAutoencoderKL(architecture={"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}).eval()
    scheduler = SCHEDULERS.build({"type": "iddpm", "num_sampling_steps": 3, "cfg_scale": 2.0})
    pipeline = VideoPipeline(build(family), vae, ClassEncoder(10), scheduler)
    size = {"num_frames": 2, "image_size": (32, 32), "fps": 8, "seed": 0, "prompt_indices": [0, 0]}
    one, other = pipeline(["3", "7"], **size)  # the same noise
    assert one.shape == (3, 2, 32, 32)
    assert torch.allclose(one, other, atol=1e-5) == (family == "Latte-unconditional")
    unguided = pipeline(["3", "7"], **size, guidance_scale=1.0)[0]
    assert torch.allclose(one, unguided, atol=1e-5) == (family == "Latte-unconditional")
    with pytest.raises(UserError, match="'a dog'"):
        pipeline(["3", "a dog"], **size)


def test_names_of_classes_are_prompts_too():
    encoder = ClassEncoder(num_classes=3, names=["city", "dog & cup", "rabbit"])
    assert encoder.encode(["dog & cup", " rabbit", "0"]).y.flatten().tolist() == [1, 2, 0]
    with pytest.raises(UserError, match=r"0 to 2, or one of city, dog & cup, rabbit\. Did you mean 'rabbit'\?"):
        encoder.encode(["rabit"])
    for names in (["city"], ["city", "city", "rabbit"]):
        with pytest.raises(ValueError, match="num_classes=3"):
            ClassEncoder(num_classes=3, names=names)
