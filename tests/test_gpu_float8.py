"""Float8 linear layers on a GPU that has float8 products: as near fp32 as emulated, and a compiled training learns."""

import pytest
import torch

from opensora.acceleration.float8 import CAPABILITY
from tests.acceleration.float8_training import WIDE, compare, train

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[quant]'")
pytestmark = pytest.mark.gpu
RECIPES = ("rowwise", "tensorwise")


@pytest.fixture(autouse=True)
def float8_gpu():
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("needs a GPU of compute capability 8.9 or later")


@pytest.mark.parametrize("recipe", RECIPES)
def test_prediction_and_gradients_are_near_those_in_fp32(recipe):
    compare(recipe, "STDiT", "cuda", **WIDE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_are_no_multiple_of_16(recipe):
    compare(recipe, "DiT-text", "cuda", size=(3, 6, 6))  # 2 x 27 rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_training_lowers_the_loss(recipe):
    losses = train(recipe, "ddp", "cuda", steps=30, compiled=True)
    assert losses[-1] < 0.5 * losses[0]
