"""A node is cut off at random instants, and what is lost is found: the short run, and what it is judged by."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.chaos.power.cut import KINDS, plan_cuts
from tests.chaos.power.endurance import run_cuts
from tests.chaos.power.kept import Kept, losses, wrong_resumption

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NUM_CUTS = 4
SEED = 3
BEFORE = Kept(
    identity=b"key",
    groups={("me", 1): "aa", ("you", 7): "bb"},
    last_number=1,
    steps=frozenset({1, 2}),
    events=b'{"event":"step","step":1}\n{"event":"step","step":2}\n{"eve',
    banned=frozenset({"mallory"}),
)
WHOLE = b'{"event":"step","step":1}\n{"event":"step","step":2}\n'


@pytest.mark.timeout(900)
def test_a_node_outlives_power_cuts(tmp_path: Path, tiny_models: Mapping[str, Path]) -> None:
    lines: list[str] = []
    cuts = plan_cuts(NUM_CUTS, seed=SEED)
    outcome = asyncio.run(run_cuts(tmp_path, tiny_models["s"], cuts=cuts, say=lines.append))
    assert not outcome.violations, "\n".join(lines)
    assert outcome.num_by_kind == dict.fromkeys(KINDS, 1)
    assert outcome.kept.newest_step >= 2
    assert outcome.num_told > 0
    assert len(outcome.kept.banned) == NUM_CUTS, "one for each life but the one that ended while it started"


def test_all_kinds_come_round_and_the_seed_decides() -> None:
    cuts = plan_cuts(50, seed=8)
    assert cuts == plan_cuts(50, seed=8) != plan_cuts(50, seed=9)
    assert set(Counter(cut.kind for cut in cuts).values()) == {12, 13}
    assert all(0 <= cut.after <= 1 for cut in cuts)


def test_nothing_lost_is_nothing_said() -> None:
    after = replace(BEFORE, events=WHOLE + b'{"event":"stop"}\n', steps=frozenset({2, 3}), last_number=4)
    assert losses(BEFORE, after) == []
    assert losses(Kept(), BEFORE) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"identity": b"other"}, "the identity is another"),
        ({"groups": {("me", 1): "aa"}}, "group 7 of you is lost"),
        ({"groups": {("me", 1): "cc", ("you", 7): "bb"}}, "group 1 of me is another body now"),
        ({"events": WHOLE[10:]}, "the event trail lost or changed a line"),
        ({"banned": frozenset()}, "the ban of mallory is forgotten"),
        ({"last_number": 0}, "the running number went back"),
        ({"steps": frozenset({1})}, "the newest checkpoint went back"),
    ],
)
def test_each_loss_is_found(change: dict[str, object], said: str) -> None:
    assert losses(BEFORE, replace(BEFORE, **change)) == [said]


def test_steps_go_on_after_the_newest_complete_checkpoint() -> None:
    silent = replace(BEFORE, steps=frozenset({2, 3}))  # the cut came before the trail could tell of step 3
    assert wrong_resumption(BEFORE, [3, 4]) == wrong_resumption(silent, [3, 4]) == wrong_resumption(silent, [4]) == []
    assert len(wrong_resumption(BEFORE, [2])) == 1, "told twice"
    assert len(wrong_resumption(BEFORE, [3, 5])) == 1, "one is missing"
    assert len(wrong_resumption(BEFORE, [1])) == 1, "gone back"
    assert len(wrong_resumption(replace(BEFORE, steps=frozenset({1})), [2])) == 2, "told and not kept, then told again"
