"""Measured times do not contain a pause."""

import time

import pytest

from ftis_node.node.pausing.gate import PauseGate
from ftis_node.node.pausing.policy import Decision
from ftis_node.node.training.group_limits import SlotPool
from ftis_node.node.training.step_shares import StepQuota
from ftis_node.node.wiring import Wiring
from tests.node.nodes import components

PAUSE = Decision("by command")


async def a_pause(gate: PauseGate, now: list[float], length_s: float) -> None:
    """Pause for a time, with a resume that a second pause interrupts."""
    await gate.begin(PAUSE)
    now[0] += 1.0  # a group in generation ends
    gate.take_effect()
    now[0] += length_s / 2
    gate.lose_effect()
    now[0] += length_s / 2
    gate.take_effect()
    gate.end()


@pytest.fixture
def now(monkeypatch):
    value = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: value[0])
    return value


async def test_the_time_per_group_is_without_a_pause(now):
    gate = PauseGate()
    slots = SlotPool(8, clock=gate.clock)
    await slots.charge()
    now[0] += 2.0
    await a_pause(gate, now, 36000.0)
    now[0] += 3.0
    assert slots.seconds_per_group == 0.0
    slots.fill()
    assert slots.seconds_per_group == 6.0


async def test_the_time_of_a_step_is_without_a_pause(now, tmp_path, monkeypatch):
    with components(tmp_path) as node:
        gate = Wiring(node).step_gate()
        monkeypatch.setattr(StepQuota, "of", lambda manifest: StepQuota(own=0, foreign=0, foreign_wait_s=0.0))
        assert await gate.wait(1)
        now[0] += 7.0
        await a_pause(node.context.pause, now, 36000.0)
        assert await gate.wait(2)
        assert gate._train_s == 8.0
        now[0] += 500.0
        assert await gate.wait(2), "the groups were ready, but a pause began before the step"
        assert gate._train_s == 8.0, "a step that was not done counts"
