"""Power cuts of a node at random instants: a short run, and the functions that check the states."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.power.cut import KINDS, plan_cuts
from tests.chaos.power.endurance import run_cuts
from tests.chaos.power.home_state import HomeState, losses, resumption_errors

NUM_CUTS = 4
SEED = 3
BEFORE = HomeState(
    identity=b"key",
    groups={("me", 1): "aa", ("you", 7): "bb"},
    last_number=1,
    steps=frozenset({1, 2}),
    events=b'{"event":"step","step":1}\n{"event":"step","step":2}\n{"eve',
    banned=frozenset({"mallory"}),
)
COMPLETE = b'{"event":"step","step":1}\n{"event":"step","step":2}\n'


@pytest.mark.timeout(900)
def test_a_node_loses_nothing_acknowledged_in_power_cuts(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    lines: list[str] = []
    cuts = plan_cuts(NUM_CUTS, seed=SEED)
    outcome = asyncio.run(run_cuts(tmp_path, tiny_models["s"], cuts=cuts, log=lines.append))
    assert not outcome.violations, "\n".join(lines)
    assert outcome.num_by_kind == dict.fromkeys(KINDS, 1)
    assert outcome.state.newest_step >= 2
    assert outcome.num_acknowledged > 0
    assert len(outcome.state.banned) == NUM_CUTS, "one per start, without the start that was cut, with the last start"


def test_the_plan_has_all_kinds_and_depends_on_the_seed() -> None:
    cuts = plan_cuts(50, seed=8)
    assert cuts == plan_cuts(50, seed=8) != plan_cuts(50, seed=9)
    assert set(Counter(cut.kind for cut in cuts).values()) == {12, 13}
    assert all(0 <= cut.after <= 1 for cut in cuts)


def test_without_a_loss_nothing_is_reported() -> None:
    after = replace(BEFORE, events=COMPLETE + b'{"event":"stop"}\n', steps=frozenset({2, 3}), last_number=4)
    assert losses(BEFORE, after) == []
    assert losses(HomeState(), BEFORE) == []


@pytest.mark.parametrize(
    ("change", "loss"),
    [
        ({"identity": b"other"}, "the identity changed"),
        ({"groups": {("me", 1): "aa"}}, "group 7 of you is lost"),
        ({"groups": {("me", 1): "cc", ("you", 7): "bb"}}, "group 1 of me has another body"),
        ({"events": COMPLETE[10:]}, "the event log lost or changed a line"),
        ({"banned": frozenset()}, "the ban of mallory is lost"),
        ({"last_number": 0}, "the sequence number fell"),
        ({"steps": frozenset({1})}, "the newest checkpoint is older"),
    ],
)
def test_each_loss_is_reported(change: dict[str, object], loss: str) -> None:
    assert losses(BEFORE, replace(BEFORE, **change)) == [loss]


def test_steps_resume_after_the_newest_complete_checkpoint() -> None:
    unlogged = replace(BEFORE, steps=frozenset({2, 3}))  # the cut came before step 3 was logged
    for before, steps in ((BEFORE, [3, 4]), (unlogged, [3, 4]), (unlogged, [4])):
        assert resumption_errors(before, steps) == []
    assert len(resumption_errors(BEFORE, [2])) == 1, "logged twice"
    assert len(resumption_errors(BEFORE, [3, 5])) == 1, "one is missing"
    assert len(resumption_errors(BEFORE, [1])) == 1, "an earlier step"
    lost = replace(BEFORE, steps=frozenset({1}))
    assert len(resumption_errors(lost, [2])) == 2, "logged without a checkpoint, and logged again"
