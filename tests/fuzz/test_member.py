"""A hostile member plays against a real node's loops: about 300 steps here, 10,000 by `python -m tests.fuzz.member`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ftis_node.node.loops.announcements import AnnouncementHandler
from ftis_node.node.loops.backfill import BackfillLoop
from tests.fuzz.battle import Battle
from tests.fuzz.deeds import CHOICES, RULES
from tests.fuzz.member import play

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS_IN_ONE_LIFE = 150


class HostileMember(RuleBasedStateMachine):
    """Hypothesis chooses the rules and the source of their values, and shortens what breaks."""

    @initialize()
    def join(self) -> None:
        self.battle = Battle()
        self.battle.start()

    @rule(name=st.sampled_from(CHOICES), seed=st.integers(0, 2**16))
    def act(self, name: str, seed: int) -> None:
        self.battle.step(RULES[name], random.Random(seed))

    def teardown(self) -> None:
        self.battle.close()


def test_hostile_members_in_short_lives() -> None:
    short = settings(max_examples=5, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(HostileMember, settings=short)


def test_a_hostile_member_in_one_longer_life() -> None:
    battle = play(STEPS_IN_ONE_LIFE, seed=4, quiet=True)
    assert battle.num_steps == STEPS_IN_ONE_LIFE
    assert battle.admitted[battle.honest.parts.context.peer_id] >= STEPS_IN_ONE_LIFE // 5
    assert sum(battle.admitted.values()) > battle.admitted[battle.honest.parts.context.peer_id]
    assert battle.victim.parts.counters.refused.total() > 0


def test_the_same_seed_does_the_same() -> None:
    """A failure of thousands of steps is of use only where it comes again."""
    first, second = (play(40, seed=9, quiet=True) for _ in range(2))
    assert first.clock.steady_s == second.clock.steady_s
    assert first.victim.parts.counters.refused == second.victim.parts.counters.refused


def _fails_later(right: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but for a fault when the battle is under way."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise ZeroDivisionError
        return right(*args, **kwargs)

    return call


def test_the_battle_sees_a_fault_that_the_guard_catches() -> None:
    with (
        patch.object(AnnouncementHandler, "handle", _fails_later(AnnouncementHandler.handle)),
        pytest.raises(ZeroDivisionError),
    ):
        play(STEPS_IN_ONE_LIFE, seed=4, quiet=True)


def test_the_battle_sees_a_loop_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    broken = patch.object(BackfillLoop, "_note_progress", _fails_later(BackfillLoop._note_progress))
    with broken, pytest.raises((AssertionError, ExceptionGroup)) as caught:
        play(STEPS_IN_ONE_LIFE, seed=4, quiet=True)
    first = caught.value.__context__ if isinstance(caught.value, ExceptionGroup) else caught.value
    assert "a loop has ended" in str(first)
    assert "the last steps: " in capsys.readouterr().out
