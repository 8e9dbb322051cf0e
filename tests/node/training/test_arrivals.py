"""Whom a step waits for: simulated runs of senders with different rates. All times are simulated seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from ftis_node.records.envelope import seal_group
from ftis_node.swarm.arrivals import FULL_WAIT_SHARE, SLOW_SHARE, TRIAL_SHARE, AwaitedSenders
from ftis_node.validation import Accepted
from tests.conftest import EOS, make_completion, make_group
from tests.node.loops.test_intake import node_on, open_disk, running
from tests.validation.test_pipeline import MANIFEST

PATIENCE_S = 30.0
OTHER = make_completion(12, 13)
OWN_S = 5.0  # of a step without a wait
LOOK_S = 0.5
HOUR_S = 3600.0


@dataclass
class Run:
    """A node that makes steps of `own_s` and waits for `num_foreign` groups as the policy says."""

    arrivals_at: Callable[[str], Iterable[float]]
    members: Sequence[str] = ("a",)
    num_foreign: int = 1
    own_s: float = OWN_S
    now: float = 1000.0
    waited_s: float = 0.0
    foreign: list[int] = field(default_factory=list)  # groups of each step

    def __post_init__(self) -> None:
        self.began_at = self.now
        self._policy = AwaitedSenders(longest_wait_s=PATIENCE_S, now=self.now)
        self._coming = sorted((at + self.now, sender) for sender in self.members for at in self.arrivals_at(sender))
        self._ready = 0

    def until(self, end_s: float) -> Run:
        while self.now - self.began_at < end_s:
            self._pass(self.own_s)
            self._wait()
            used = min(self._ready, self.num_foreign)
            self._ready -= used
            self.foreign.append(used)
        return self

    def _wait(self) -> None:
        waited_s = 0.0
        while self._ready < self.num_foreign and waited_s < PATIENCE_S:
            quota = {"work_s": self.own_s, "quota": self.num_foreign}
            if not (awaited := self._policy.awaited(self.members, now=self.now, **quota)):
                return
            self._pass(LOOK_S)
            self._policy.waited(awaited, LOOK_S)
            waited_s += LOOK_S
            self.waited_s += LOOK_S

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        while self._coming and self._coming[0][0] <= self.now:
            at, sender = self._coming.pop(0)
            self._policy.arrived(sender, now=at)
            self._ready += 1

    @property
    def slowdown(self) -> float:
        return (self.now - self.began_at) / (self.own_s * len(self.foreign))


def never(sender: str) -> list[float]:
    return []


def every(seconds: float, *, start: float = 1.0, end: float = 4 * HOUR_S) -> list[float]:
    return [start + seconds * number for number in range(int((end - start) / seconds) + 1)]


@pytest.mark.parametrize("num_members", [1, 30])
def test_members_that_send_nothing_cost_little_time(num_members):
    run = Run(never, members=[str(number) for number in range(num_members)]).until(2 * HOUR_S)
    assert run.waited_s <= TRIAL_SHARE * 2 * HOUR_S
    assert run.waited_s <= PATIENCE_S + LOOK_S, "the same members were waited for again"
    assert run.slowdown < 1.06


def test_a_stream_of_new_members_that_send_nothing_costs_little_time():
    run = Run(never)
    for number in range(200):
        run.members = [f"{number}-{other}" for other in range(4)]
        run.until((number + 1) * 60.0)
    assert run.slowdown <= 1 / (1 - TRIAL_SHARE) + 0.01


def test_a_sender_that_falls_silent_costs_one_wait_and_is_awaited_again_when_it_returns():
    times = every(4.0, end=600) + every(4.0, start=2 * HOUR_S, end=3 * HOUR_S)
    run = Run(lambda sender: times).until(600)
    assert run.waited_s < 60
    before = run.waited_s
    run.until(2 * HOUR_S - 60)
    assert run.waited_s - before <= PATIENCE_S + LOOK_S
    run.until(3 * HOUR_S - 60)
    assert run.foreign[-20:] == [1] * 20, "the returned sender is not awaited"


@pytest.mark.parametrize("gap_s", [7.0, 19.0])
def test_a_useful_sender_is_always_awaited(gap_s):
    run = Run(lambda sender: every(gap_s)).until(2 * HOUR_S)
    late = run.foreign[len(run.foreign) // 4 :]
    assert late == [1] * len(late), "a step did not wait for the group of its sender"
    assert run.slowdown <= 1 / FULL_WAIT_SHARE


@pytest.mark.parametrize(
    ("own_s", "num_foreign", "num_members", "gap_s"), [(0.2, 6, 1, 60.0), (5.0, 1, 1, 29.0), (5.0, 12, 10, 100.0)]
)
def test_slow_senders_cost_little_time_and_their_groups_are_used(own_s, num_foreign, num_members, gap_s):
    run = Run(
        lambda sender: every(gap_s, start=gap_s * (1 + int(sender) / num_members)),
        members=[str(number) for number in range(num_members)],
        num_foreign=num_foreign,
        own_s=own_s,
    ).until(2 * HOUR_S)
    assert run.slowdown <= 1 / (1 - SLOW_SHARE - TRIAL_SHARE) + 0.01
    assert sum(run.foreign) >= num_members * (2 * HOUR_S / gap_s - 2)


def test_a_node_without_own_work_waits_for_a_slow_sender():
    policy = AwaitedSenders(longest_wait_s=PATIENCE_S, now=0.0)
    for at in (1.0, HOUR_S):
        policy.arrived("a", now=at)
    assert policy.awaited([], now=HOUR_S + 1, work_s=math.inf, quota=4) == ["a"]


@pytest.mark.parametrize("has_signal", [True, False])
async def test_only_a_group_with_a_signal_makes_its_sender_awaited(tmp_path, identity, has_signal):
    completions = (make_completion(10, 11, EOS, reward=1.0) if has_signal else make_completion(14, 15), OTHER)
    group = make_group(identity, run_id=MANIFEST.run_id, completions=completions)
    with node_on(tmp_path, open_disk()) as node:
        async with running(node) as intake:
            verdict = await intake.submit(seal_group(group, identity).to_bytes(), origin=identity.peer_id)
        assert isinstance(verdict, Accepted)
        awaited = intake.awaited_senders.awaited([], now=time.monotonic(), work_s=math.inf, quota=1)
    assert awaited == [identity.peer_id] * has_signal
