"""The schedule is pure, fair and the same for the same seed; the docs have the table that the faults make."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import report
from tests.chaos.faults.catalog import ALL_FAULTS, KINDS, chosen
from tests.chaos.schedule import first, lanes
from tests.chaos.swarm import SwarmNode

ROOT = Path(__file__).parents[2]
NODES = ("a", "b", "c")
FITTING = {"kill": NODES, "cut": NODES, "core": ("a",), "gone": ()}


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    assert first(50, FITTING, seed=1) == first(50, FITTING, seed=1)
    assert [one.fault for one in first(50, FITTING, seed=1)] != [one.fault for one in first(50, FITTING, seed=2)]
    turned = dict(reversed(FITTING.items()))
    assert first(50, FITTING, seed=1) == first(50, turned, seed=1), "whatever order they are told in"


def test_each_round_has_each_fault_once_and_a_node_has_time_to_get_well() -> None:
    planned = first(60, FITTING, seed=3)
    assert [one.number for one in planned] == list(range(1, 61))
    for start in range(0, 60, 3):
        assert sorted(one.fault for one in planned[start : start + 3]) == ["core", "cut", "kill"]
    twice = [two for one, two in pairwise(planned) if one.node == two.node]
    assert all(one.fault == "core" for one in twice), "only where no other node would do"
    assert {one.node for one in planned if one.fault == "kill"} == set(NODES)
    assert len({one.dice for one in planned}) == 60


def test_each_node_has_its_own_faults_in_their_order() -> None:
    planned = first(60, FITTING, seed=3)
    by_node = lanes(planned)
    assert set(by_node) == set(NODES)
    for node, own in by_node.items():
        assert own == [one for one in planned if one.node == node]


def test_no_fault_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault"):
        first(1, {"gone": ()}, seed=1)


def test_faults_are_chosen_by_kind_and_by_name() -> None:
    assert list(chosen([])) == [fault.name for fault in ALL_FAULTS]
    links = chosen(["links", "liar"])
    assert {fault.kind for fault in links.values()} == {"links", "members"}
    assert {"cut-off", "liar"} <= set(links)
    with pytest.raises(ValueError, match="erathquake: no such fault"):
        chosen(["erathquake"])


def test_the_documentation_has_the_table_of_faults() -> None:
    assert report.table() in (ROOT / "tests/chaos/README.md").read_text(), "python -m tests.chaos --table"
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS)
    assert set(KINDS) >= {"processes", "links", "members"}


def test_every_fault_names_a_test_that_exists() -> None:
    for fault in ALL_FAULTS:
        path, _, name = fault.shown_by.partition("::")
        functions = ast.walk(ast.parse((ROOT / path).read_text()))
        names = {one.name for one in functions if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, f"{fault.name}: {fault.shown_by}"


def test_a_node_is_harmed_only_in_what_its_role_has() -> None:
    def harmed(role: str) -> set[str]:
        line: Any = None
        node = SwarmNode("a", ROOT, ("join",), line, role=role)
        return {fault.name for fault in ALL_FAULTS if fault.fits(node)}

    assert harmed("full") - harmed("learner") == {"kill-generator", "stop-generator"}
    assert {fault.kind for fault in ALL_FAULTS if fault.name in harmed("full") - harmed("generator")} == {
        *("processes", "files", "members"),
    }
    assert not {"kill-learner", "checkpoint-cut", "liar"} & harmed("generator")
    assert {"kill-daemon", "cut-off", "database-turned", "clock-hours-back"} <= harmed("learner") & harmed("generator")
