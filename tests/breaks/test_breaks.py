"""Each known fault applies to the present tree and names tests that exist."""

import ast
from collections import Counter

import pytest

from ftis_node.errors import UsageError
from tests.breaks.__main__ import FAILED
from tests.breaks.faults import ROOT, all_faults, chosen

FAULTS = all_faults()
TOPICS = {"security", "exactly_once", "mathematics"}
MAX_FAULTS = 60


def test_each_fault_applies_to_this_tree_and_names_existing_tests():
    for fault in FAULTS:
        ast.parse(fault.applied_to((ROOT / fault.file).read_text()))
        assert fault.tests
        for path, _, function in (test.partition("::") for test in fault.tests):
            assert f"def {function}" in (ROOT / path).read_text(), fault.name


def test_there_are_few_faults_of_three_topics():
    assert {one.topic for one in FAULTS} == TOPICS
    assert len(FAULTS) <= MAX_FAULTS
    assert [name for name, number in Counter(one.name for one in FAULTS).items() if number > 1] == []


def test_a_text_that_does_not_occur_exactly_once_and_an_unknown_name_are_errors():
    for times in (0, 2):
        with pytest.raises(ValueError, match=f"occurs {times} times in {FAULTS[0].file}"):
            FAULTS[0].applied_to(FAULTS[0].old * times)
    with pytest.raises(UsageError, match="no fault 'loss'"):
        chosen(FAULTS, ["loss"])


def test_only_a_failed_test_finds_a_fault():
    output = "ERROR    ftis_node.x:x.py:251 gone\nFAILED tests/a/test_b.py::test_c[a - b] - Some[x] - y\nERROR a.py\n"
    assert FAILED.findall(output) == ["tests/a/test_b.py::test_c[a - b]"]
