"""Hostile members against a real node's loops: some hundred steps here, 10,000 by `python -m tests.fuzz.simulation`."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from ftis_node.node.loops.backfill import BackfillLoop
from ftis_node.node.peers.announcements import AnnouncementHandler
from tests.fuzz.simulation import play

NUM_STEPS = 150


def test_invariants_hold_beside_hostile_members_and_a_seed_reproduces_the_run():
    simulation, again = (play(NUM_STEPS, seed=9) for _ in range(2))
    assert simulation.clock.steady_s == again.clock.steady_s
    assert simulation.victim.parts.peers.counters.refused == again.victim.parts.peers.counters.refused
    assert simulation.num_honest_admitted >= NUM_STEPS // 5
    assert sum(simulation.admitted.values()) > simulation.num_honest_admitted
    assert simulation.victim.parts.peers.counters.refused.total() > 0


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


def test_the_simulation_reports_an_exception_that_the_guard_catches():
    handle = _fails_later(AnnouncementHandler.handle)
    with patch.object(AnnouncementHandler, "handle", handle), pytest.raises(ZeroDivisionError):
        play(NUM_STEPS, seed=4)


def test_the_simulation_reports_a_loop_that_ends(capsys):
    broken = patch.object(BackfillLoop, "_fill_gaps", _fails_later(BackfillLoop._fill_gaps))
    with broken, pytest.raises((AssertionError, ExceptionGroup)) as caught:
        play(NUM_STEPS, seed=4)
    first = caught.value.__context__ if isinstance(caught.value, ExceptionGroup) else caught.value
    assert "a loop has ended" in str(first)
    assert "the last steps: " in capsys.readouterr().out
