"""The evaluations that the status keeps over a long run."""

from __future__ import annotations

import pytest

from ftis_node.node import context
from ftis_node.node.context import EvaluationHistory
from ftis_node.telemetry.status import EvalStatus


def test_the_status_keeps_the_first_and_the_newest_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_EVALUATIONS", 4)
    history = EvaluationHistory()
    for step in range(0, 50, 5):
        for task in ("a", "b"):
            history.add(EvalStatus(step=step, task=task, pass_at_1=0.5, n=8))
    assert [(entry.step, entry.task) for entry in history.entries] == [(0, "a"), (0, "b"), (45, "a"), (45, "b")]
