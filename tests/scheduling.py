"""How pytest-xdist divides the tests: a file to a worker, and files that share running nodes to the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

from tests.tiers import LONGEST_FIRST, SHARED

if TYPE_CHECKING:
    import pytest


class ByFile(LoadScopeScheduling):
    """Gives each worker one file after the other, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """What runs on one worker: the group of `SHARED` that the test is in, or else its file."""
    file = nodeid.split("::", 1)[0]
    return next((name for name, paths in SHARED.items() if file.startswith(paths)), file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts tests: groups that take minutes begin at once, so that no worker waits at the end for another's."""
    order = {group: position for position, group in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))
