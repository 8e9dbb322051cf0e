"""Every package has known faults, and their patches apply to the present tree."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from ftis_node.errors import UsageError
from tests.breaks.__main__ import summary
from tests.breaks.patches import FOLDER, ROOT, Break, all_breaks, chosen, read_break
from tests.breaks.running import IN_MAKE_TEST, SCENARIOS, SUMMARY, Outcome, Result

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = {path.name for path in (ROOT / "ftis_node").iterdir() if (path / "__init__.py").exists()}
MIN_FAULTS, MIN_IN_IMPORTANT = 2, 4
IMPORTANT = {"algorithms", "learner", "validation", "replay", "gossip", "node"}
MAX_CHANGED_LINES, MAX_IN_A_FOLDER = 5, 24
BASE = "base"  # the folder of faults in modules outside of packages
BREAKS = all_breaks()


def test_every_package_has_faults() -> None:
    counts = Counter(one.package for one in BREAKS)
    assert set(counts) - {BASE} == PACKAGES
    required = {package: MIN_IN_IMPORTANT if package in IMPORTANT else MIN_FAULTS for package in PACKAGES}
    assert {package for package, number in required.items() if counts[package] < number} == set()


def test_each_patch_is_small_and_names_existing_tests() -> None:
    assert {one.name: fault for one in BREAKS if (fault := _fault_of(one))} == {}


def _fault_of(one: Break) -> str:
    """Return what is invalid in a patch's header or size, or ""."""
    for path, _, function in (test.partition("::") for test in one.tests):
        if not (ROOT / path).exists():
            return f"there is no {path}"
        if function and f"def {function}(" not in (ROOT / path).read_text():
            return f"{path} has no {function}"
    if not one.sentence.endswith("."):
        return "its sentence does not end with a full stop"
    lines = [line for line in one.path.read_text().splitlines() if not line.startswith(("+++", "---"))]
    if max(sum(line.startswith(sign) for line in lines) for sign in "-+") > MAX_CHANGED_LINES:
        return f"it changes more than {MAX_CHANGED_LINES} lines"
    folder = "ftis_node/" if one.package == BASE else f"ftis_node/{one.package}/"
    is_inside = one.files and all(name.startswith(folder) for name in one.files)
    return "" if is_inside else f"it changes {one.files}, not files of {folder}"


def test_each_patch_applies_to_this_tree() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git and a repository are needed to test whether a patch applies")
    stale = {}
    for one in BREAKS:
        command = ["git", "-C", str(ROOT), "apply", "--check", str(one.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            stale[one.name] = done.stderr.strip()
    assert stale == {}, "the code changed: make these patches again"


def test_no_folder_has_too_many_patches() -> None:
    counts = Counter(one.path.parent for one in BREAKS)
    assert max(counts.values()) <= MAX_IN_A_FOLDER


def test_a_header_without_its_lines_is_an_error(tmp_path: Path) -> None:
    patch = tmp_path / "some.patch"
    patch.write_text("Break: a sentence.\ndiff --git a/x b/x\nTests: too late\n")
    with pytest.raises(ValueError, match=r"some.patch has 0 lines 'Tests:'"):
        read_break(patch)


def test_faults_are_chosen_by_name_and_by_package() -> None:
    breaks = [Break(FOLDER / name, "", ()) for name in ("workers/one.patch", "workers/two.patch", "lab/one.patch")]
    assert [one.name for one in chosen(breaks, [])] == ["workers/one", "workers/two", "lab/one"]
    assert [one.name for one in chosen(breaks, ["lab", "workers/two"])] == ["workers/two", "lab/one"]
    with pytest.raises(UsageError, match="no break 'workers/three'; known: workers/one, workers/two$"):
        chosen(breaks, ["workers/three"])


def test_a_line_of_a_captured_log_is_not_read_as_a_failed_test() -> None:
    output = "ERROR    ftis_node.x:x.py:251 gone\nFAILED tests/a/test_b.py::test_c[a - b] - Some[x] - y\nERROR a.py\n"
    assert SUMMARY.findall(output) == [("FAILED", "tests/a/test_b.py::test_c[a - b]"), ("ERROR", "a.py")]


def test_the_summary_counts_both_tiers() -> None:
    caught, survived = Outcome(Result.CAUGHT, test="tests/x.py::test_x"), Outcome(Result.SURVIVED)
    outcomes = {"a": {IN_MAKE_TEST: caught}, "b": {IN_MAKE_TEST: survived, SCENARIOS: caught}}
    assert summary(outcomes, with_scenarios=False) == "1 of 2 caught by make test"
    assert summary(outcomes, with_scenarios=True) == "1 of 2 caught by make test, 2 by the whole suite"
