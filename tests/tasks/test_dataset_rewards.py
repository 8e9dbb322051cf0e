"""Weighted rewards of `dataset:` in the scoring process, with costly patterns and malformed texts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ftis_node.errors import TaskError
from ftis_node.records.group import CompletionStatus
from ftis_node.tasks import load_task
from ftis_node.tasks.answers import answer_in
from ftis_node.tasks.base import Task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation.pipeline import REWARD_SLACK
from tests.conftest import write_distribution
from tests.tasks.completions import think_answer

PLUGIN = """
def half(item, text):
    return 0.5

def five(item, text):
    return 5
"""


def task_of(folder: Path, query: str = "", answer: str = "1/2") -> Task:
    (folder / "d.jsonl").write_text(json.dumps({"q": "What is 0.5?", "a": answer}) + "\n")
    return load_task(f"dataset:{folder}/d.jsonl?prompt=q&answer=a{query}")


def scores(task: Task, *texts: str) -> list[float]:
    return [task.score(task[0], text) for text in texts]


@pytest.mark.usefixtures("rows_in_this_process")
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [1.0, 1.0, 0.0, 0.0, 0.0]), ("&reward=exact", [1.0, 0.0, 0.0, 0.0, 0.0]),
        ("&reward=format", [1.0, 1.0, 1.0, 0.0, 0.0]), ("&reward=math:1,format:0.2", [1.0, 1.0, 1 / 6, 0.0, 0.0]),
        ("&reward=math:2,exact:1,format:1", [1.0, 3 / 4, 1 / 4, 0.0, 0.0]),
        ("&reward=math:3,regex&pattern=^1/2$", [3 / 4, 3 / 4, 0.0, 1 / 4, 0.0]),
        ("&reward=math,exact&style=plain", [1 / 2, 0.0, 0.0, 1.0, 0.0]),
    ],
)  # fmt: skip
def test_the_reward_is_the_weighted_mean(tmp_path, query, expected):
    texts = [think_answer(" 1/2 "), think_answer("0.5"), think_answer("7"), "1/2", ""]
    assert scores(task_of(tmp_path, query), *texts) == pytest.approx(expected, abs=1e-12)


@pytest.mark.usefixtures("rows_in_this_process")
def test_the_full_reward_is_exactly_one(tmp_path):
    """pass@1 counts a completion as right if its reward is at least 1."""
    for weights in ("math:0.1,format:0.2,exact:0.7", "math:7,format:11,exact:13", "math:1,format:0.3,exact:0.25"):
        assert scores(task_of(tmp_path, f"&reward={weights}"), think_answer("1/2")) == [1.0]


@pytest.mark.usefixtures("rows_in_this_process")
def test_the_smallest_weight_is_larger_than_the_slack_of_validation(tmp_path):
    """A peer's claimed reward may differ by REWARD_SLACK."""
    least, other = scores(task_of(tmp_path, "&reward=math:0.999,format:0.001"), think_answer("7"), "7")
    assert other == 0.0
    assert least > 5 * REWARD_SLACK


async def test_no_text_makes_a_pattern_backtrack(tmp_path):
    cost = ScoringCost()
    patterns = ("(a%2B)%2B$", "(.*)(.*)(.*)(.*)(.*)(.*)x$", "(a{1,100}){1,10}b")
    tasks = [task_of(tmp_path, f"&reward=regex&pattern={pattern}&name=p{i}") for i, pattern in enumerate(patterns)]
    async with IsolatedScorer(*tasks) as scorer:
        for task in tasks:
            ((_, status),) = await scorer.score(task[0], ["a" * 50_000 + "!"], cost=cost)
            assert status is CompletionStatus.SCORED
    assert cost.num_unfinished == 0


def test_a_daemon_with_the_reward_regex_imports_no_pyarrow(tmp_path):
    """pyarrow takes 50 MB of memory. The child process that reads the rows checks the pattern."""
    task_of(tmp_path, "")
    name = f"dataset:{tmp_path}/d.jsonl?prompt=q&reward=regex&pattern=x"
    code = f"import sys; from ftis_node.tasks import load_task; load_task({name!r}); print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_text_of_invalid_unicode_is_scored(tmp_path):
    task = task_of(tmp_path, "&reward=regex,exact&pattern=x")
    assert [task.score(task[0], text) for text in ("\ud800", "x\ud800", "\0x")] == [0.0, 0.5, 0.5]


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "reward_plugin.py").write_text(PLUGIN)
    rewards = "[ftis_node.rewards]\nhalf = reward_plugin:half\nfive = reward_plugin:five\n"
    write_distribution(tmp_path, "reward-plugin", rewards)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reward_plugin", raising=False)


@pytest.mark.usefixtures("plugin")
def test_a_reward_of_a_plug_in_is_part_of_the_mean(tmp_path):
    assert scores(task_of(tmp_path, "&reward=math:1,half:3"), think_answer("1/2"), "") == [0.625, 0.375]
    with pytest.raises(TaskError, match=r"gave the reward 5.0, which is not in \[0, 1\]"):
        scores(task_of(tmp_path, "&reward=math:9,five:1"), think_answer("1/2"))


def test_answers_for_votes_follow_the_style(tmp_path):
    task = task_of(tmp_path, "&reward=math,format")
    texts = (think_answer(" $07$ "), think_answer(" "), "7")
    assert [answer_in(task, task[0], text) for text in texts] == ["7", None, None]
    plain = task_of(tmp_path, "&reward=exact&style=plain")
    assert [answer_in(plain, plain[0], text) for text in (" a  b ", "")] == ["a b", None]
