"""The list of mutants follows the code; `make test-mutants` runs it."""

from tests.conftest import ROOT
from tests.mutants.mutants import MUTANTS, misplaced


def test_every_mutant_has_its_place_and_its_tests():
    assert misplaced(ROOT) == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
