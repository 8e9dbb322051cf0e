"""An exception of any kind at a boundary, caused by an item of one peer, ends no node and affects only that peer.

For each kind all points are armed at once. Each raises once, for the values of the hostile peer, when the node reaches
it. An honest peer sends groups meanwhile.
"""

import asyncio
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.node.supervision.shutdown import stack_of
from ftis_node.swarm.peer_guard import UNPROVEN, Place
from ftis_node.telemetry.events import read_events
from tests.attacks.member import joined
from tests.injection.boundaries import ELSEWHERE, KINDS, POINTS, STORE, points_for
from tests.injection.full_node import FullNode, Victim, as_member, maker_of, running_node, stop
from tests.injection.hostile import Hostile
from tests.injection.injector import Injector, Unexpected
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

WITHIN_S = 60.0
NUM_INTAKE_TASKS = 4
HONEST_PERIOD_S = 0.15
MORE_STEPS, MORE_GROUPS = 1, 2


def test_each_boundary_has_points():
    assert {*POINTS, *ELSEWHERE} == set(Place)
    assert not POINTS.keys() & ELSEWHERE.keys()


async def test_an_exception_of_any_kind_at_each_boundary_affects_only_its_peer(tmp_path):
    home, injector = Home(tmp_path / "home"), Injector()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftis")))
        injector.install(points_for(Unexpected), stack)
        async with running_node(home, folder) as (node, task):
            await as_member(_inject_all(home, folder, node, task, injector))
    _assert_charged(home)


async def _inject_all(home: Home, folder: Path, node: FullNode, task: asyncio.Task[None], injector: Injector) -> None:
    victim, maker = Victim(node.parts), maker_of(home)
    async with joined(folder / "honest", maker, victim) as honest, joined(folder / "hostile", maker, victim) as member:
        hostile = Hostile(member, node, injector)
        works = honest.keep_sending(num_tokens=4, period_s=HONEST_PERIOD_S), hostile.run()
        sending = [asyncio.create_task(work) for work in works]

        def is_running_and(condition: bool) -> bool:
            for one in (task, *sending):
                if one.done():
                    one.result()  # raises the error that ended it
            assert not task.done(), "the node ended"
            node.clear_penalties(hostile.peer_ids)
            return condition

        async def goes_on(steps: int, groups: int) -> None:
            steps, groups = node.parts.context.state.step + steps, node.accepted_of(honest.peer_id) + groups
            await eventually(
                lambda: is_running_and(
                    node.parts.context.state.step >= steps and node.accepted_of(honest.peer_id) >= groups
                ),
                within_s=WITHIN_S,
            )

        try:
            await goes_on(1, 1)
            for kind, make_error in KINDS.items():
                points = points_for(kind)
                injector.arm(points, make_error)
                injector.armed[STORE] = 2
                try:
                    await eventually(lambda: is_running_and(not injector.armed), within_s=WITHIN_S)
                except AssertionError as error:
                    raise AssertionError(f"{kind.__name__} not raised at {sorted(injector.armed)}") from error
                await goes_on(MORE_STEPS, MORE_GROUPS)
        finally:
            await stop(*sending)
        await eventually(lambda: _is_at_rest(node))
        others = [fault for fault in node.faults if fault["peer"] not in {*hostile.peer_ids, UNPROVEN}]
        assert not others, f"charged to other peers than the hostile one, {hostile.peer_ids}"
        assert node.parts.gossip.guard.may_work(honest.peer_id)
        assert not node.parts.peers.registry.peers[honest.peer_id].refused["fault"]
    assert not task.done()
    assert not node.unhandled, "an error that ends the daemon"


def _is_at_rest(node: FullNode) -> bool:
    """Return whether no pull runs and each envelope has a verdict."""
    stacks = [stack_of(task) for task in asyncio.all_tasks() if task.get_name().startswith("intake-")]
    assert len(stacks) == NUM_INTAKE_TASKS, stacks
    is_validating = any(not stack[-1].endswith(" get") for stack in stacks)
    return not node.pull._slots.num_in_use and not is_validating


def allowed(place: Place) -> set[Place]:
    """Return the places under which the node may count a fault: some boundaries share code."""
    requests = {Place.SERVE, Place.MESSAGE, Place.PULL, Place.CATCH_UP, Place.CONFIRM, Place.HELLO, Place.DIAL}
    items = {Place.COUNT, Place.JUDGE, Place.AUDIT, Place.ANNOUNCEMENT, Place.CATCH_UP, Place.PULL}
    directory = {Place.DIRECTORY, Place.RECORD}
    return {place}.union(*(group for group in (requests, items, directory) if place in group))


def _assert_charged(home: Home) -> None:
    """Assert that each exception that no code handles by its type has an event with its place."""
    seen = defaultdict(set)
    for event in read_events(home.events, name="peer_fault"):
        kind, _, point = event["error"].partition(": ")
        if kind == Unexpected.__name__:
            seen[point].add(Place(event["place"]))
    missing = {point: seen[point] for place in POINTS for point in POINTS[place] if not seen[point] <= allowed(place)}
    assert not missing, missing
    assert not points_for(Unexpected) - seen.keys(), "an exception that was not charged"
