"""Final evaluation of a trial: the ensemble of the trained members on held-out problems of every domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.evaluation.ensemble import MODES, evaluate_ensemble
from ftis_node.evaluation.members import Member
from ftis_node.lab.experiment.in_process import InProcessLearner
from ftis_node.lab.experiment.trial_result import FinalEvaluationResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftis_node.node.protocols import Learning


@dataclass(frozen=True, slots=True)
class FinalEvaluation:
    """Tasks to evaluate, and the modes of the ensemble. `max_tokens` bounds prompt and completion together.

    The mode `gate` learns from prompts of `gate_task`, or of the evaluated task if it is None.
    """

    tasks: tuple[str, ...]
    modes: tuple[str, ...] = MODES
    limit: int = 256
    max_tokens: int = 96
    dev_prompts: int = 32
    gate_prompts: int = 256
    gate_task: str | None = None


async def run_final_evaluation(
    exam: FinalEvaluation, learners: Mapping[str, Learning], folder: Path
) -> list[FinalEvaluationResult]:
    """Write the current models to `folder` and evaluate them as an ensemble. Raises FtisError."""
    members = []
    for name, learner in learners.items():
        assert isinstance(learner, InProcessLearner)
        learner.export(folder / name)
        members.append(Member(name, str(folder / name)))
    results = []
    for task in exam.tasks:
        found = await evaluate_ensemble(
            members,
            task,
            modes=exam.modes,
            limit=exam.limit,
            max_tokens=exam.max_tokens,
            engine="torch",
            dev_prompts=exam.dev_prompts,
            gate_prompts=exam.gate_prompts,
            gate_task=exam.gate_task,
        )
        results += [
            FinalEvaluationResult(
                task=found.task,
                mode=entry.name,
                pass_at_1=entry.result.pass_at_1,
                n=entry.result.n,
                generated_tokens=entry.generated_tokens,
                forward_tokens=entry.forward_tokens,
            )
            for entry in found.modes
        ]
    return results
