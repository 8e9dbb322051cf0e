"""The table has every point that handles a value of a peer, and every place of guarded work."""

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

HELPERS = {"node/loops/intake.py:IntakeLoop._work_for"}  # the place is a parameter


def _unknown(found: set[str]) -> list[str]:
    patterns = [*EXCEPTIONS, *UNREACHED]
    return sorted(
        point
        for point in found - {*injected(), *GENERATORS, *LEARNERS}
        if not any(fnmatch(point, pattern) for pattern in patterns)
    )


def test_each_point_has_an_injection_or_a_reason() -> None:
    unknown = _unknown(points())
    assert not unknown, (
        f"{', '.join(unknown)} handles a value of a peer. Run the work under `PeerGuard.work_for`. Then add the point "
        "to tests/injection/table.py: to POINTS with its place, or to EXCEPTIONS with a reason."
    )


def test_each_entry_of_the_table_is_a_point() -> None:
    found = points()
    assert {*injected(), *GENERATORS, *LEARNERS} - found == {STORE}
    unused = [pattern for pattern in [*EXCEPTIONS, *UNREACHED] if not any(fnmatch(point, pattern) for point in found)]
    assert not unused


def test_a_new_reader_and_a_new_callback_are_found(tmp_path: Path) -> None:
    for package_name in ("records", "gossip", "node", "validation"):
        (tmp_path / package_name).mkdir()
    (tmp_path / "records" / "offer.py").write_text("def open_offer(data: bytes) -> Offer: ...\n")
    (tmp_path / "node" / "offers.py").write_text(
        "from ftis_node.records.offer import open_offer\n"
        "class Offers:\n"
        "    def take(self, announcer: str) -> None: ...\n"
        "    async def read(self, blob: object) -> None: return open_offer(blob)\n"
        "    def safe(self, peer_id: str) -> None:\n"
        "        with self.guard.work_for(peer_id, Place.PULL): ...\n"
    )
    assert "open_offer" in readers_of(tmp_path)
    assert points(tmp_path) == {"node/offers.py:Offers.take", "node/offers.py:Offers.read>open_offer"}
    assert len(_unknown(points(tmp_path))) == 2


def test_each_place_is_used_and_has_an_injection() -> None:
    used: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, function in functions(ast.parse(path.read_text())):
            where = f"{path.relative_to(PACKAGE).as_posix()}:{name}"
            for place in places_of(function):
                used.setdefault(place, []).append(where)
    computed = set(used.pop("", [])) - HELPERS
    assert computed == {"gossip/interface.py:Gossip._counted_pull"}, "a computed place: add its function to HELPERS"
    assert set(used) == {place.name for place in Place}, "place without work, or work at an unknown place"
    without = {place.name for place in Place} - {place.name for place in POINTS}
    assert without == {"WEIGHTS"} and GENERATORS, f"no injection at {without}"


@pytest.mark.parametrize("table", [EXCEPTIONS, UNREACHED], ids=["exceptions", "unreached"])
def test_each_exception_has_a_reason(table: dict[str, str]) -> None:
    assert all(reason.strip() for reason in table.values())
