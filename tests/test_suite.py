"""The division, the schedule and the report of a test run."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import trained_models
from tests.scheduling import group_of, longest_first, make_sendable
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


def test_files_that_share_nodes_are_one_group_and_others_are_separate():
    assert group_of("tests/attacks/test_http.py::test_x") == group_of("tests/attacks/test_copies.py::test_y[1]")
    assert group_of("tests/replay/test_buffer.py::test_x[a::b]") == "tests/replay/test_buffer.py"


def test_long_groups_come_first_and_the_others_keep_their_order():
    nodeids = ["tests/b.py::one", "tests/a.py::one", "tests/attacks/test_http.py::one", "tests/b.py::two"]
    items: list[Any] = [Item(nodeid) for nodeid in nodeids]
    longest_first(items)
    assert [item.nodeid for item in items] == [nodeids[2], nodeids[0], nodeids[1], nodeids[3]]


def test_a_report_with_lone_surrogates_can_be_sent():
    report: Any = SimpleNamespace(sections=[("log", "peer \ud800 æ")], longrepr="failed: \udcff")
    make_sendable(report)
    assert (report.sections, report.longrepr) == ([("log", "peer \\ud800 æ")], "failed: \\udcff")


def test_a_changed_recipe_changes_the_hash(monkeypatch):
    known = trained_models._recipe_hash(0.4)
    assert known == trained_models._recipe_hash(0.4)
    assert known != trained_models._recipe_hash(0.5)
    monkeypatch.setattr(trained_models, "RECIPE_FILES", trained_models.RECIPE_FILES[1:])
    assert known != trained_models._recipe_hash(0.4)


def test_a_model_is_made_once(tmp_path, monkeypatch):
    made: list[str] = []

    def make(size, folder, *, scale):
        made.append(size)
        folder.mkdir()

    monkeypatch.setattr(trained_models, "CACHE", tmp_path / "models")
    monkeypatch.setattr(trained_models, "_make", make)
    assert trained_models.trained_model("s") == trained_models.trained_model("s")
    assert made == ["s"]
