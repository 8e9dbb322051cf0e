"""The division of the tests."""

import ast
from pathlib import Path
from typing import Any

from tests.tiers import ALL_SCENARIOS, LONG, LONGEST_FIRST, MISSING, NEEDS, SHARED, SMOKE, mark

ROOT = Path(__file__).parents[1]


class Item:
    """The part of a collected test that marking uses."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.markers: list[str] = []

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker.name)


def marked(*nodeids: str) -> dict[str, list[str]]:
    items: list[Any] = [Item(nodeid) for nodeid in nodeids]
    mark(items)
    return {item.nodeid: item.markers for item in items}


def test_every_path_of_the_table_is_a_test():
    paths = [*ALL_SCENARIOS, *LONG, *SMOKE, *(path for paths in NEEDS.values() for path in paths)]
    missing = [path for path in paths if not _exists(path)]
    assert missing == []
    assert [path for group in SHARED.values() for path in group if not _exists(path)] == []
    groups = {*SHARED, *(path for path in LONGEST_FIRST if (ROOT / path).is_file())}
    assert set(LONGEST_FIRST) <= groups


def _exists(path: str) -> bool:
    file, _, function = path.partition("::")
    if not function:
        return (ROOT / file).exists()
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return function.partition("[")[0] in names


def test_scenarios_and_tests_that_need_vllm_are_marked(monkeypatch):
    monkeypatch.setitem(MISSING, "vllm", lambda: "")
    engine = "tests/generation/test_generation_vllm_engine.py::test_x"
    attack, long = "tests/attacks/test_http.py::test_x", f"{LONG[0]}::test_x"
    markers = marked(attack, "tests/attacks_of_others/test_buffer.py::test_x", engine, *SMOKE, long)
    assert list(markers.values()) == [["scenario"], [], ["scenario", "vllm"], ["vllm"], ["long"]]


def test_a_test_whose_need_is_missing_is_skipped(monkeypatch):
    monkeypatch.setitem(MISSING, "vllm", lambda: "vLLM is not installed")
    assert marked(*SMOKE) == {SMOKE[0]: ["vllm", "skip"]}
