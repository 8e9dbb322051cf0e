"""The limits of episodes in `eval` and `ensemble`: those of the run in which the model was trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.manifest import load_manifest
from ftis_node.evaluation import evaluate
from ftis_node.evaluation.evaluate import Asking, Expert, Study
from ftis_node.tasks import load_task

UNUSED: Any = None
MAX_TOKENS = 96


def write_run(folder: Path, preset: str) -> None:
    """Write a run with turns of 5 tokens, and with 3 turns in an episode."""
    run = load_manifest(preset)
    episode = run.episode and run.episode.model_copy(update={"max_turns": 3})
    sampling = run.sampling.model_copy(update={"max_completion_tokens": 5})
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(run.model_copy(update={"episode": episode, "sampling": sampling}).to_toml())


@pytest.mark.parametrize(
    ("runs", "task", "limits"),
    [
        (["guess-ftis"], "guess", (5, 3)),
        (["calculator-ftis", "guess-ftis"], "guess", (5, 3)),
        ([], "guess", (8, 4)),
        (["calculator-ftis"], "guess", (8, 4)),
        (["arithmetic-ftis"], "arithmetic", (MAX_TOKENS - 10, None)),
    ],
)
async def test_episodes_have_the_limits_of_the_run(tmp_path, monkeypatch, runs, task, limits) -> None:
    for preset in runs:
        write_run(tmp_path / preset, preset)
    given: dict[str, Any] = {}

    async def answer(*_: Any, **options: Any) -> list[Any]:
        given.update(options)
        return []

    monkeypatch.setattr(evaluate, "answer_problems", answer)
    sources: list[Any] = [SimpleNamespace(path=tmp_path / folder) for folder in (*runs, "without a run")]
    experts = [Expert(UNUSED, source, UNUSED) for source in sources]
    problems = load_task(task, "test")
    study = Study(experts, problems, UNUSED, Asking(max_tokens=MAX_TOKENS), num_parts=1)
    await study._answers(UNUSED, UNUSED, "m")
    max_turns = given["episode"] and given["episode"].max_turns
    assert (given["completion_limit"](10), max_turns) == limits
    assert given["completion_limit"](MAX_TOKENS - 2) == 2
