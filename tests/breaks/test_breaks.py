"""Each known fault applies to the present tree and names tests that exist."""

import ast
from collections import Counter

from tests.breaks.__main__ import ROOT, all_faults

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
    assert {one.topic for one in FAULTS} == TOPICS and len(FAULTS) <= MAX_FAULTS
    assert [name for name, number in Counter(one.name for one in FAULTS).items() if number > 1] == []
