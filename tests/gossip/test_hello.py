"""Hello requests: each peer is queried once, and again if its answer may change."""

import asyncio

from ftis_node.gossip.membership import MAX_HELLOS_IN_FLIGHT, MemberProbe
from tests.waiting import eventually


class Answers:
    """Answers by peer; None for all others."""

    def __init__(self, **answers: bool) -> None:
        self.by_peer = answers
        self.queried: list[str] = []

    async def __call__(self, peer_id: str) -> bool | None:
        self.queried.append(peer_id)
        return self.by_peer.get(peer_id)


async def _update(probe: MemberProbe, *connected: str) -> list[str]:
    async with asyncio.TaskGroup() as group:
        probe.update(connected, group)
    return probe.members


async def test_peers_that_answer_are_queried_once():
    answers = Answers(member=True, bootstrap=False)
    probe = MemberProbe(answers)
    for _ in range(3):
        assert await _update(probe, "member", "bootstrap") == ["member"]
    assert sorted(answers.queried) == ["bootstrap", "member"]


async def test_silent_peers_are_queried_again_after_pauses_of_up_to_64_s():
    """A peer that has banned this node ends each stream without an answer."""
    answers, now = Answers(), 0
    probe = MemberProbe(answers, clock=lambda: now)
    queried_at = []
    for now in range(200):
        num_queries = len(answers.queried)
        assert await _update(probe, "banned us") == []
        queried_at += [now] * (len(answers.queried) - num_queries)
    assert queried_at == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    answers.by_peer["banned us"], now = True, 255
    assert await _update(probe, "banned us") == ["banned us"]


async def test_a_silent_peer_that_connects_again_is_queried_at_once():
    answers = Answers()
    probe = MemberProbe(answers, clock=lambda: 0.0)
    for connected in (["silent"], ["silent"], [], ["silent"]):
        await _update(probe, *connected)
    assert answers.queried == ["silent", "silent"]


async def test_a_peer_that_answered_no_is_queried_again_after_recheck():
    answers = Answers(starting=False, member=True)
    probe = MemberProbe(answers)
    await _update(probe, "starting", "member")
    answers.by_peer["starting"] = True
    assert await _update(probe, "starting", "member") == ["member"]
    probe.recheck()
    assert probe.members == ["member"]
    assert sorted(await _update(probe, "starting", "member")) == ["member", "starting"]
    assert answers.queried.count("member") == 1


async def test_many_silent_peers_do_not_delay_the_query_of_a_new_one():
    """The silent peers are due again, and their ids sort before that of the new peer."""
    gate, queried, now = asyncio.Event(), list[str](), 0.0
    silent = [f"{number:03d}" for number in range(4 * MAX_HELLOS_IN_FLIGHT)]

    async def query(peer_id):
        queried.append(peer_id)
        if peer_id in silent and now:
            await gate.wait()
        return None if peer_id in silent else True

    probe = MemberProbe(query, clock=lambda: now)
    for _ in silent:
        await _update(probe, *silent)
    assert sorted(queried) == silent
    now = 1000.0
    async with asyncio.TaskGroup() as group:
        probe.update(silent, group)
        probe.update([*silent, "new"], group)
        await asyncio.sleep(0)
        assert queried[-1] == "new"
        gate.set()
    assert probe.members == ["new"]


async def test_queries_in_flight_are_bounded():
    gate, num_queries = asyncio.Event(), 0

    async def query(peer_id):
        nonlocal num_queries
        num_queries += 1
        await gate.wait()
        return True

    probe = MemberProbe(query)
    peers = [f"peer {number}" for number in range(MAX_HELLOS_IN_FLIGHT + 4)]
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            probe.update(peers[:2], group)
            await asyncio.sleep(0)
        assert num_queries == 2
        probe.update(peers, group)
        await asyncio.sleep(0)
        assert num_queries == MAX_HELLOS_IN_FLIGHT
        gate.set()
    await eventually(lambda: _update(probe, *peers))
    assert sorted(probe.members) == sorted(peers)
