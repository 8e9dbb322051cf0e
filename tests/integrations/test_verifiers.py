"""The examples with a taskset and an environment of the package verifiers, if it is installed."""

import os
import sys
from pathlib import Path

import pytest

from ftis_node.errors import TaskError
from ftis_node.records.group import CompletionStatus, PromptRef
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost
from tests.conftest import write_distribution

pytest.importorskip("verifiers", reason="pip install verifiers==0.4.0")

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITED = """
import verifiers.v1 as vf
import reverse_words

__all__ = ["BoxedTaskset"]

class BoxedTask(vf.Task[reverse_words.ReverseData]):
    NEEDS_CONTAINER = True

class BoxedTaskset(vf.Taskset[BoxedTask]):
    def load(self):
        yield BoxedTask(reverse_words.ReverseData(prompt="p", answer="a"), self.config.task)
"""


@pytest.fixture(autouse=True)
def examples(tmp_path, monkeypatch):
    """The examples as installed packages, without pip."""
    tasks = "[ftis_node.tasks]\nreverse-words = ftis_node_task_verifiers:VerifiersTask\n"
    write_distribution(tmp_path, "ftis-node-task-verifiers", tasks)
    entry = "[ftis_node.episodes]\nhigher-lower = ftis_node_episode_verifiers:VerifiersEpisode\n"
    write_distribution(tmp_path, "ftis-node-episode-verifiers", entry)
    (tmp_path / "boxed.py").write_text(LIMITED)
    for folder in (tmp_path, EXAMPLES / "ftis-node-task-verifiers", EXAMPLES / "ftis-node-episode-verifiers"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the scoring process


async def test_a_taskset_is_scored_in_the_scoring_process():
    task = load_task("reverse-words")
    assert (len(task), len(load_task("reverse-words", split="test"))) == (44, 20)
    item = task.resolve(PromptRef("reverse-words", "train", 1))
    assert item.prompt == ({"role": "user", "content": "Reverse: apple bridge"},)
    cost = ScoringCost()
    async with IsolatedScorer(task) as scorer:
        scored = await scorer.score(item, ["bridge apple", "apple bridge", "x" * 41, ""], cost=cost)
    assert scored == [(reward, CompletionStatus.SCORED) for reward in (1.0, 0.2, 0.0, 0.2)]


def test_a_taskset_with_containers_is_an_error(monkeypatch):
    import ftis_node_task_verifiers

    monkeypatch.setattr(ftis_node_task_verifiers.VerifiersTask, "taskset", "boxed")
    with pytest.raises(TaskError, match="a task with a container, tools or a judge needs a running model"):
        load_task("reverse-words")


@pytest.mark.parametrize(
    ("texts", "observations", "is_over", "reward"),
    [
        (["10", "x", "8"], ("lower", "no number"), True, 1.0), (["1", "2", "3", "4", "5"], ("higher",) * 4, True, 0.0),
        (["1"], ("higher",), False, 0.0), (["\x00" * 100_000, "8"], ("no number",), True, 1.0),
        (["9" * 5_000, "8"], ("no number",), True, 1.0),
    ],
)  # fmt: skip
async def test_an_environment_is_played_in_the_scoring_process(texts, observations, is_over, reward):
    task = load_task("higher-lower")
    async with IsolatedScorer(task) as scorer:
        played = await scorer.play(task[3], texts, cost=ScoringCost())
    assert played is not None
    assert (played.observations, played.is_over, played.reward) == (observations, is_over, reward)
