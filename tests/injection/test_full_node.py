"""A node survives an unexpected exception at each point where it handles values of peers.

All points are armed at once. Each raises once, for the values of one peer, when the node reaches it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.node.loops.pull import PULLS_IN_FLIGHT
from ftis_node.node.supervision.task_monitor import AT_WORK
from ftis_node.swarm.peer_guard import Place
from ftis_node.telemetry.events import read_events
from tests.attacks.member import joined
from tests.injection.full_node import (
    FullNode,
    Victim,
    as_member,
    maker_of,
    prepare_home,
    running_node,
    send_valid_groups,
    stop,
)
from tests.injection.hostile import Hostile
from tests.injection.injector import Injector
from tests.injection.table import FOR_ALL_PEERS, STORE, injected
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

WITHIN_S = 120.0
NUM_TRIES = 3
NUM_INTAKE_TASKS = 3
MORE_STEPS, MORE_GROUPS = 2, 4


async def test_a_node_continues_to_train_after_an_exception_at_each_point(tmp_path: Path) -> None:
    home, injector, places = Home(tmp_path / "home"), Injector(), injected()
    prepare_home(home)
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
        sending = asyncio.create_task(send_valid_groups(honest)), asyncio.create_task(hostile.run())

        def is_running_and(condition: bool) -> bool:
            for one in (task, *sending):
                if one.done():
                    one.result()  # raises the error that ended it
            assert not task.done(), "the node ended"
            node.clear_penalties(hostile.peer_ids)
            return condition

        try:
            await eventually(
                lambda: is_running_and(node.accepted_of(honest.peer_id) > 1 and node.parts.context.state.step > 1)
            )
            for _ in range(NUM_TRIES):  # an exception in a clean-up replaces the one before it
                left = set(injected()) - {fault["error"] for fault in node.faults}
                injector.arm(left - FOR_ALL_PEERS)
                injector.arm(left & FOR_ALL_PEERS, for_all_peers=True)
                injector.arm(left & {STORE}, times=2)
                try:
                    await eventually(lambda: is_running_and(not injector.armed), within_s=WITHIN_S)
                except AssertionError as error:
                    raise AssertionError(f"not reached: {sorted(injector.armed)}") from error
            steps, groups = node.parts.context.state.step + MORE_STEPS, node.accepted_of(honest.peer_id) + MORE_GROUPS
            await eventually(lambda: is_running_and(node.parts.context.state.step >= steps))
            await eventually(lambda: is_running_and(node.accepted_of(honest.peer_id) >= groups))
        finally:
            await stop(*sending)
        await eventually(lambda: _is_at_rest(node))
    assert not task.done()
    assert not node.unhandled, "an error that ends the daemon"


def _is_at_rest(node: FullNode) -> bool:
    """Return whether no pull runs and each envelope has a verdict."""
    states = [(name, state.waits_for) for name, state, _ in node.monitor.states() if name.startswith("intake-")]
    assert len(states) == NUM_INTAKE_TASKS, states
    is_validating = any(waits_for == AT_WORK for _, waits_for in states)
    return node.pull._slots._free._value == PULLS_IN_FLIGHT and not +node.pull._slots._asking and not is_validating


def allowed(place: Place) -> set[str]:
    """Return the places under which the node may count a fault: requests share code, and so do counters."""
    requests = {Place.SERVE, Place.MESSAGE, Place.PULL, Place.CATCH_UP, Place.CONFIRM, Place.HELLO, Place.DIAL}
    counters = {Place.COUNT, Place.STATUS, Place.AUDIT, Place.ANNOUNCEMENT, Place.JUDGE, Place.BATCH}
    return {one.value for one in (requests if place in requests else counters if place in counters else {place})}


def _assert_charged(node: FullNode, home: Home, injector: Injector) -> None:
    """Assert that each fault is counted, and has an event with its place."""
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
