"""Run the tests of a fault in a separate process, and read their outcome."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.breaks.tree import Tree

LIMIT_S = 1800.0  # of one run; the suite limits each test
MAX_DETAIL = 200  # characters
FAILED, PASSED, NONE_CHOSEN = 1, 0, 5  # pytest's exit codes
TEST = r"(?:[\w.-]+/)*[\w.-]+\.py(?:::\w+)*(?:\[.*?\])?"  # matches no line of a captured log
SUMMARY = re.compile(rf"^(FAILED|ERROR|PASSED) ({TEST})(?: - .*)?$", re.MULTILINE)
IN_MAKE_TEST, SCENARIOS = "not scenario and not long", "scenario or long"


class Result(StrEnum):
    """The result of the tests of a fault."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    NONE_RAN = "no test ran"
    DOES_NOT_APPLY = "does not apply"
    FAILS_ANYWAY = "fails without it"


class Outcome(NamedTuple):
    """A result with the test that failed, and a detail as text."""

    result: Result
    seconds: float = 0.0
    test: str = ""
    detail: str = ""


def run_tests(tree: Tree, tests: Sequence[str], *, marked: str) -> Outcome:
    """Run tests until the first one fails. A test that cannot be loaded does not catch a fault."""
    began = time.monotonic()
    try:
        done = _pytest(tree, tests, "-x", marked=marked)
    except subprocess.TimeoutExpired:
        return Outcome(Result.NONE_RAN, LIMIT_S, detail=f"still running after {LIMIT_S:.0f} s")
    seconds = time.monotonic() - began
    failed = [test for what, test in SUMMARY.findall(done.stdout) if what != "PASSED"]
    if done.returncode == FAILED and failed:
        return Outcome(Result.CAUGHT, seconds, test=failed[0])
    if done.returncode == PASSED:
        return Outcome(Result.SURVIVED, seconds)
    if done.returncode == NONE_CHOSEN:
        return Outcome(Result.NONE_RAN, seconds, detail=f"none of them is `{marked}`")
    return Outcome(Result.NONE_RAN, seconds, detail=f"pytest ended with {done.returncode}: {_last_line(done)}")


def failing(tree: Tree, tests: Sequence[str], *, marked: str) -> set[str]:
    """Return those of `tests` that do not pass in the present tree; of a parametrized test all cases run.

    Raises FtisError if they cannot run.
    """
    functions = {test: test.partition("[")[0] for test in tests}
    try:
        done = _pytest(tree, sorted(set(functions.values())), "-rA", marked=marked)
    except subprocess.TimeoutExpired:
        return set(tests)
    if done.returncode not in (PASSED, FAILED):
        raise FtisError(f"the tests that caught a fault cannot run again: {_last_line(done)}")
    cases = SUMMARY.findall(done.stdout)
    passed = {test.partition("[")[0] for what, test in cases if what == "PASSED"}
    passed -= {test.partition("[")[0] for what, test in cases if what != "PASSED"}
    return {test for test, function in functions.items() if function not in passed}


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines() or [""]
    return lines[-1][:MAX_DETAIL]


def _pytest(tree: Tree, tests: Sequence[str], *options: str, marked: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in the tree. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", "-m", marked, *options]
    return subprocess.run(
        command, cwd=tree.folder, env=tree.environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
