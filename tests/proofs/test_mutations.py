"""The lists of mutations fit the code."""

import pytest

from tests.helpers import ROOT
from tests.proofs import mutate


@pytest.mark.parametrize("name", mutate.LISTS)
def test_mutations_change_one_place_each(name):
    for mutation in mutate.read(name):
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1 and mutation.new != mutation.old, mutation


@pytest.mark.parametrize("name", sorted(mutate.LISTS.keys() - {"certificate"}))
def test_one_file_has_the_tests_of_each(name):
    for mutation in mutate.read(name):
        mutate.arguments(ROOT, mutation.tests)
