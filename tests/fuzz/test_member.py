"""Hostile members against a real node's loops: about 300 steps here, 10,000 by `python -m tests.fuzz.member`."""

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
from tests.fuzz.actions import CHOICES, RULES
from tests.fuzz.member import play
from tests.fuzz.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_STEPS = 150


class HostileMember(RuleBasedStateMachine):
    """A state machine: hypothesis chooses rules and seeds, and reduces failing examples."""

    @initialize()
    def join(self) -> None:
        self.simulation = Simulation()
        self.simulation.start()

    @rule(name=st.sampled_from(CHOICES), seed=st.integers(0, 2**16))
    def act(self, name: str, seed: int) -> None:
        self.simulation.step(RULES[name], random.Random(seed))

    def teardown(self) -> None:
        self.simulation.close()


def test_invariants_hold_in_short_simulations() -> None:
    short = settings(max_examples=5, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(HostileMember, settings=short)


def test_invariants_hold_in_a_longer_simulation() -> None:
    simulation = play(NUM_STEPS, seed=4, quiet=True)
    assert simulation.num_steps == NUM_STEPS
    assert simulation.admitted[simulation.honest.parts.context.peer_id] >= NUM_STEPS // 5
    assert sum(simulation.admitted.values()) > simulation.admitted[simulation.honest.parts.context.peer_id]
    assert simulation.victim.parts.counters.refused.total() > 0


def test_a_seed_reproduces_a_simulation() -> None:
    """A failure after thousands of steps must be reproducible."""
    first, second = (play(40, seed=9, quiet=True) for _ in range(2))
    assert first.clock.steady_s == second.clock.steady_s
    assert first.victim.parts.counters.refused == second.victim.parts.counters.refused


def _fails_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with an exception from its 61st call on."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise ZeroDivisionError
        return function(*args, **kwargs)

    return call


def test_the_simulation_reports_an_exception_that_the_guard_catches() -> None:
    with (
        patch.object(AnnouncementHandler, "handle", _fails_later(AnnouncementHandler.handle)),
        pytest.raises(ZeroDivisionError),
    ):
        play(NUM_STEPS, seed=4, quiet=True)


def test_the_simulation_reports_a_loop_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    broken = patch.object(BackfillLoop, "_note_progress", _fails_later(BackfillLoop._note_progress))
    with broken, pytest.raises((AssertionError, ExceptionGroup)) as caught:
        play(NUM_STEPS, seed=4, quiet=True)
    first = caught.value.__context__ if isinstance(caught.value, ExceptionGroup) else caught.value
    assert "a loop has ended" in str(first)
    assert "the last steps: " in capsys.readouterr().out
