"""Randomness as a function of ids."""

import pytest
import torch

from opensora.utils.seed import derive_seed, generator, generators, rand, randint, randn_like


def test_the_same_path_gives_the_same_numbers_for_ever():
    # a stored value: a change here would change every resumed run
    assert derive_seed(42, "train", 0, 0) == 593058291174292950
    assert torch.randint(1000, (3,), generator=generator(42, "train", 0, 0)).tolist() == [268, 199, 672]


def test_paths_do_not_collide():
    paths = [(s, w, a, b) for s in (0, 1) for w in ("train", "sample") for a in range(20) for b in range(20)]
    assert len({derive_seed(*p) for p in paths}) == len(paths)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(1) != derive_seed("1")


def test_seed_zero_is_a_seed():
    assert torch.equal(torch.randn(3, generator=generator(0)), torch.randn(3, generator=generator(0)))


def test_rows_do_not_depend_on_the_batch():
    x = torch.empty(4, 3, 2)
    whole = randn_like(x, generators(7, "noise", ids=range(4)))
    alone = randn_like(x[:1], generators(7, "noise", ids=[2]))
    assert torch.equal(whole[2:3], alone)
    assert torch.equal(
        randint(1000, generators(7, ids=range(4)), "cpu")[1:2], randint(1000, generators(7, ids=[1]), "cpu")
    )
    assert rand(generators(7, ids=range(4)), "cpu").shape == (4,)


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    randn_like(torch.empty(2, 2), generators(7, ids=range(2)))
    assert torch.equal(before, torch.get_rng_state())


def test_wrong_number_of_generators():
    with pytest.raises(ValueError, match="3 generators for a batch of 2"):
        randn_like(torch.empty(2, 2), generators(7, ids=range(3)))
