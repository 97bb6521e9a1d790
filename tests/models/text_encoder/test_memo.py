"""Remembered captions equal encoded ones, and memory stays bounded."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from opensora.models.text_encoder import MemoizedTextEncoder, TextCondition

ROW_BYTES = 4 * 6 * 4 + 6  # y [1, 6, 4] fp32 and mask [6] bool


class Letters(nn.Module):
    """The text contract on letters: an embedding, so that rows are independent of each other."""

    output_dim = 4
    model_max_length = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(128, 4)
        self.encoded = []

    @torch.no_grad()
    def encode(self, texts):
        self.encoded.append(list(texts))
        codes = torch.tensor([[ord(c) for c in text[:6].ljust(6, "\0")] for text in texts])
        return TextCondition(self.embedding(codes)[:, None], codes != 0)


@pytest.fixture
def plain():
    return Letters()


def test_rows_equal_the_plain_encoder_and_only_misses_are_encoded(plain):
    memo = MemoizedTextEncoder(plain)
    for texts in (["dog", "lake"], ["lake", "boat", "lake", "dog"], ["boat", "boat"]):
        remembered, fresh = memo.encode(texts), Letters().encode(texts)
        assert_close(remembered.y, fresh.y, rtol=0, atol=0)
        assert_close(remembered.mask, fresh.mask)
    assert plain.encoded == [["dog"], ["lake"], ["boat"]]
    assert (memo.output_dim, memo.model_max_length) == (4, 6)
    assert memo.num_bytes == 3 * ROW_BYTES


def test_the_longest_unused_goes_first(plain):
    memo = MemoizedTextEncoder(plain, max_bytes=2 * ROW_BYTES)
    memo.encode(["a", "b"])
    memo.encode(["a"])
    memo.encode(["c"])  # drops b
    memo.encode(["a", "c"])
    assert plain.encoded == [["a"], ["b"], ["c"]]
    memo.encode(["b"])
    assert plain.encoded[-1] == ["b"]
    assert memo.num_bytes == 2 * ROW_BYTES


def test_a_batch_larger_than_the_room_is_still_whole(plain):
    memo = MemoizedTextEncoder(plain, max_bytes=ROW_BYTES // 2)
    texts = ["a", "b", "a"]
    assert_close(memo.encode(texts).y, Letters().encode(texts).y)
    assert memo.num_bytes == 0


def test_a_kept_row_does_not_share_memory_with_the_result(plain):
    memo = MemoizedTextEncoder(plain)
    memo.encode(["dog"]).y.zero_()
    assert_close(memo.encode(["dog"]).y, Letters().encode(["dog"]).y)
