"""An exception that nobody expects, at every point where a node handles what peers send: the node trains on.

All points are armed at once, and each raises once, for the values of one peer, in whatever order they are reached.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.node.supervision.task_monitor import AT_WORK
from ftis_node.swarm.peer_guard import Place
from ftis_node.telemetry.events import read_events
from tests.attacks.member import joined
from tests.injection.full_node import (
    FullNode,
    Victim,
    as_member,
    maker_of,
    prepared_home,
    running_node,
    send_honestly,
    stopped,
)
from tests.injection.hostile import Hostile
from tests.injection.injector import Injector
from tests.injection.table import FOR_ALL, STORE, injected
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

WITHIN_S = 120.0
NUM_TRIES = 3
NUM_INTAKE_TASKS = 3
MORE_STEPS, MORE_GROUPS = 2, 4


async def test_a_node_trains_on_whatever_the_values_of_a_peer_raise(tmp_path: Path) -> None:
    home, injector, places = Home(tmp_path / "home"), Injector(), injected()
    prepared_home(home)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftis")))
        injector.install(places, stack)
        async with running_node(home, folder) as (node, task):
            await as_member(_inject_all(home, folder, node, task, injector))
    _assert_charged(node, home, injector)


async def _inject_all(home: Home, folder: Path, node: FullNode, task: asyncio.Task[None], injector: Injector) -> None:
    victim, maker = Victim(node.parts), maker_of(home)
    async with joined(folder / "honest", maker, victim) as honest, joined(folder / "hostile", maker, victim) as member:
        hostile = Hostile(member, node, injector)
        sending = asyncio.create_task(send_honestly(honest)), asyncio.create_task(hostile.run())

        def has_ended_or(is_so: bool) -> bool:
            for one in (task, *sending):
                if one.done():
                    one.result()  # raises what ended it
            assert not task.done(), "the node ended"
            node.forgive(hostile.peer_ids)
            return is_so

        try:
            await eventually(
                lambda: has_ended_or(node.accepted_of(honest.peer_id) > 1 and node.parts.context.state.step > 1)
            )
            for _ in range(NUM_TRIES):  # an error in a clean-up hides the one before it
                left = set(injected()) - {fault["error"] for fault in node.faults}
                injector.arm(left - FOR_ALL)
                injector.arm(left & FOR_ALL, is_for_all=True)
                injector.arm(left & {STORE}, times=2)
                try:
                    await eventually(lambda: has_ended_or(not injector.armed), within_s=WITHIN_S)
                except AssertionError as error:
                    raise AssertionError(f"not reached: {sorted(injector.armed)}") from error
            steps, groups = node.parts.context.state.step + MORE_STEPS, node.accepted_of(honest.peer_id) + MORE_GROUPS
            await eventually(lambda: has_ended_or(node.parts.context.state.step >= steps))
            await eventually(lambda: has_ended_or(node.accepted_of(honest.peer_id) >= groups))
        finally:
            await stopped(*sending)
        await eventually(lambda: _is_at_rest(node))
    assert not task.done()
    assert not node.unhandled, "an error that ends the daemon"


def _is_at_rest(node: FullNode) -> bool:
    """No pull is left under way, and no envelope without a verdict."""
    places = node.parts.context.settings.swarm.pulls_in_flight
    states = [(name, state.waits_for) for name, state, _ in node.monitor.states() if name.startswith("intake-")]
    assert len(states) == NUM_INTAKE_TASKS, states
    is_judging = any(waits_for == AT_WORK for _, waits_for in states)
    return node.pull._slots._free._value == places and not +node.pull._slots._asking and not is_judging


def allowed(place: Place) -> set[str]:
    """Where a fault at a point of this place may be counted: whatever a peer is asked goes the same way."""
    asking = {Place.SERVE, Place.MESSAGE, Place.PULL, Place.CATCH_UP, Place.CONFIRM, Place.HELLO, Place.DIAL}
    counting = {Place.COUNT, Place.STATUS, Place.AUDIT, Place.ANNOUNCEMENT, Place.JUDGE, Place.BATCH}  # shared
    return {one.value for one in (asking if place in asking else counting if place in counting else {place})}


def _assert_charged(node: FullNode, home: Home, injector: Injector) -> None:
    """Each fault is counted with its place, and in the event trail with the peer."""
    seen = defaultdict(set)
    for event in read_events(home.events, name="peer_fault"):
        seen[event["error"].removeprefix("Unexpected: ")].add(event["place"])
    wrong = {
        point: seen[point]
        for point, place in injected().items()
        if not seen[point] or not seen[point] <= allowed(place)
    }
    assert not wrong, wrong
    assert node.parts.counters.refused["fault"] >= len(injected())
