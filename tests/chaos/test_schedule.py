"""The schedule is fair and equal for equal seeds. The README has the tables, and the named tests exist."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import report
from tests.chaos.faults.catalog import ALL_FAULTS, KINDS, chosen
from tests.chaos.invariants import checks as invariants
from tests.chaos.schedule import by_node, first
from tests.chaos.swarm import SwarmNode

ROOT = Path(__file__).parents[2]
NODES = ("a", "b", "c")
FITTING = {"kill": NODES, "cut": NODES, "core": ("a",), "impossible": ()}


def test_the_seed_determines_the_faults_and_a_schedule_needs_a_possible_one() -> None:
    assert first(50, FITTING, seed=1) == first(50, dict(reversed(FITTING.items())), seed=1)
    assert [one.fault for one in first(50, FITTING, seed=1)] != [one.fault for one in first(50, FITTING, seed=2)]
    with pytest.raises(ValueError, match="no fault"):
        first(1, {"impossible": ()}, seed=1)


def test_each_round_has_each_fault_once_and_consecutive_faults_affect_different_nodes() -> None:
    planned = first(60, FITTING, seed=3)
    assert [one.number for one in planned] == list(range(1, 61))
    for start in range(0, 60, 3):
        assert sorted(one.fault for one in planned[start : start + 3]) == ["core", "cut", "kill"]
    repeated = [two for one, two in pairwise(planned) if one.node == two.node]
    assert all(one.fault == "core" for one in repeated), "no other node can have this fault"
    assert len({one.seed for one in planned}) == 60
    assert {node: [one for one in planned if one.node == node] for node in NODES} == by_node(planned)


def test_faults_are_chosen_by_kind_and_by_name() -> None:
    assert list(chosen([])) == [fault.name for fault in ALL_FAULTS]
    links = chosen(["links", "false-claims"])
    assert {fault.kind for fault in links.values()} == {"links", "members"}
    assert {"isolate", "false-claims"} <= set(links)
    with pytest.raises(ValueError, match="erathquake: no such fault"):
        chosen(["erathquake"])


def test_the_readme_has_the_tables_and_every_fault_names_a_test_that_exists() -> None:
    readme = (ROOT / "tests/chaos/README.md").read_text()
    assert report.table() in readme and invariants.table() in readme, "python -m tests.chaos --table"
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS)
    assert set(KINDS) == {"processes", "links", "members", "files", "clock"}
    for fault in ALL_FAULTS:
        path, _, name = fault.shown_by.partition("::")
        functions = ast.walk(ast.parse((ROOT / path).read_text()))
        names = {one.name for one in functions if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, f"{fault.name}: {fault.shown_by}"


def test_a_node_has_the_faults_that_fit_its_role() -> None:
    def fitting(role: str) -> set[str]:
        proxy: Any = None
        node = SwarmNode("a", ROOT, ("join",), proxy, role=role)
        return {fault.name for fault in ALL_FAULTS if fault.fits(node)}

    assert fitting("full") - fitting("learner") == {"kill-generator", "stop-generator"}
    assert not {"kill-learner", "checkpoint-truncated", "false-claims"} & fitting("generator")
    assert {"kill-daemon", "isolate", "database-corrupted", "clock-hours-back"} <= fitting("learner") & fitting(
        "generator"
    )
