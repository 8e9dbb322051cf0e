"""How pytest-xdist divides the tests: a file runs on one worker, and files that share running nodes on the same one."""

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.tiers import LONGEST_FIRST, SHARED


class ByFile(LoadScopeScheduling):
    """A scheduler that gives each worker one file after the other, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return the group of `SHARED` that has the test, or else its file. A group runs on one worker."""
    file = nodeid.split("::", 1)[0]
    return next((name for name, paths in SHARED.items() if file.startswith(paths)), file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort groups that take minutes to the front, so that no worker waits for another at the end."""
    order = {group: position for position, group in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def make_sendable(report: pytest.TestReport) -> None:
    """Escape lone surrogates in the log and failure of a test: pytest-xdist cannot send them."""
    report.sections = [(title, _escaped(text)) for title, text in report.sections]
    if report.longrepr is not None and (text := str(report.longrepr)) != _escaped(text):
        report.longrepr = _escaped(text)


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
