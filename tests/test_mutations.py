"""The list of mutations itself: its anchors stand in their files, and its tests exist."""

import re

import pytest
from mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_still_fits_the_code(mutation):
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old
    for test in mutation.test.split():
        file, name = test.split("::")[0], re.sub(r"\[.*", "", test.split("::")[-1])
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_mutations_have_names_of_their_own():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))


def test_a_fault_stands_once():
    faults = [(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS]
    assert [fault for fault in faults if faults.count(fault) > 1] == []
