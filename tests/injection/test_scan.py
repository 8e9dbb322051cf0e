"""Every point where a peer's value is handled is in the table, and every piece of guarded work is known."""

from __future__ import annotations

import ast
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import pytest

from ftis_node.swarm.peer_guard import Place
from tests.injection.scan import PACKAGE, functions, places_of, points, readers_of
from tests.injection.table import EXCEPTIONS, GENERATORS, LEARNERS, POINTS, STORE, UNREACHED, injected

if TYPE_CHECKING:
    from pathlib import Path

HELPERS = {"node/loops/intake.py:IntakeLoop._work_for"}  # they name the place by a parameter


def _unknown(found: set[str]) -> list[str]:
    patterns = [*EXCEPTIONS, *UNREACHED]
    return sorted(
        point
        for point in found - {*injected(), *GENERATORS, *LEARNERS}
        if not any(fnmatch(point, pattern) for pattern in patterns)
    )


def test_every_point_has_an_injection_or_a_reason() -> None:
    unknown = _unknown(points())
    assert not unknown, (
        f"a value of a peer is handled at {', '.join(unknown)}: run the work under `PeerGuard.work_for` and name the "
        "point in tests/injection/table.py, in POINTS with its place, or in EXCEPTIONS with a reason"
    )


def test_no_line_of_the_table_is_about_what_is_gone() -> None:
    found = points()
    assert {*injected(), *GENERATORS, *LEARNERS} - found == {STORE}
    unused = [pattern for pattern in [*EXCEPTIONS, *UNREACHED] if not any(fnmatch(point, pattern) for point in found)]
    assert not unused


def test_a_new_reader_and_a_new_callback_are_found(tmp_path: Path) -> None:
    for room in ("records", "gossip", "node", "validation"):
        (tmp_path / room).mkdir()
    (tmp_path / "records" / "gift.py").write_text("def open_gift(data: bytes) -> Gift: ...\n")
    (tmp_path / "node" / "gifts.py").write_text(
        "from ftis_node.records.gift import open_gift\n"
        "class Gifts:\n"
        "    def take(self, announcer: str) -> None: ...\n"
        "    async def read(self, blob: object) -> None: return open_gift(blob)\n"
        "    def safe(self, peer_id: str) -> None:\n"
        "        with self.guard.work_for(peer_id, Place.PULL): ...\n"
    )
    assert "open_gift" in readers_of(tmp_path)
    assert points(tmp_path) == {"node/gifts.py:Gifts.take", "node/gifts.py:Gifts.read>open_gift"}
    assert len(_unknown(points(tmp_path))) == 2


def test_every_place_is_used_and_every_place_in_use_has_an_injection() -> None:
    used: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, function in functions(ast.parse(path.read_text())):
            where = f"{path.relative_to(PACKAGE).as_posix()}:{name}"
            for place in places_of(function):
                used.setdefault(place, []).append(where)
    computed = set(used.pop("", [])) - HELPERS
    assert computed == {"gossip/interface.py:Gossip._counted_pull"}, "a place that is computed: name it in HELPERS"
    assert set(used) == {place.name for place in Place}, "a place without work, or work at an unknown place"
    without = {place.name for place in Place} - {place.name for place in POINTS}
    assert without == {"WEIGHTS"} and GENERATORS, f"nothing is injected at {without}"


@pytest.mark.parametrize("table", [EXCEPTIONS, UNREACHED], ids=["exceptions", "unreached"])
def test_every_exception_has_a_reason(table: dict[str, str]) -> None:
    assert all(len(reason.split()) >= 1 for reason in table.values())
