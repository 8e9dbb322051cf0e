"""reasoning-gym's tasks have the same problems in every process, and score their answers."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest

from ftis_node.errors import TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks import load_task
from ftis_node.tasks.rg import REFUSED, SPLITS, ReasoningGymTask
from tests.tasks.completions import think_answer

# Different kinds: text, numbers, boards, code-like answers, partial scores, problems generated at load.
SAMPLE = [
    "base_conversion",
    "basic_arithmetic",
    "binary_matrix",
    "calendar_arithmetic",
    "chain_sum",
    "complex_arithmetic",
    "countdown",
    "family_relationships",
    "knights_knaves",
    "leg_counting",
    "letter_counting",
    "maze",
    "n_queens",
    "simple_integration",
    "spell_backward",
    "string_insertion",
    "syllogism",
    "word_sorting",
]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("generator", SAMPLE)
def test_the_reference_scores_one_only_in_the_format(generator: str, split: str) -> None:
    task = load_task(f"rg:{generator}", split=split)
    item = task[3]
    assert task.resolve(item.ref) == item
    assert task.score(item, think_answer(item.answer)) == 1.0
    assert task.score(item, item.answer) == 0.0
    assert task.score(item, think_answer("zzz 7 qqq")) < 0.5


def test_a_prompt_describes_the_format() -> None:
    task = load_task("rg:leg_counting", split="test")
    assert task[0].ref == PromptRef("rg:leg_counting", "test", 0)
    assert "<answer>" in task[0].prompt[0]["content"]
    assert "legs" in task[0].prompt[1]["content"]
    assert task.isolate_scoring


def test_partial_scores_are_kept() -> None:
    task = load_task("rg:word_sorting")
    words = task[0].answer.split(", ")
    assert 0 < task.score(task[0], think_answer(", ".join(reversed(words)))) < 1


def test_a_problem_without_a_reference_is_scored_from_the_problem() -> None:
    task = load_task("rg:graph_color")
    assert task[0].answer == ""
    assert task.score(task[0], think_answer('{"0": 1}')) < 1


@pytest.mark.parametrize(
    "text", ["", "<answer>", think_answer("\ud800\x00"), think_answer("{" * 30_000), think_answer("1e400")]
)
@pytest.mark.parametrize("generator", ["countdown", "spiral_matrix", "graph_color", "complex_arithmetic"])
def test_malformed_text_does_not_raise(generator: str, text: str) -> None:
    task = load_task(f"rg:{generator}")
    assert 0.0 <= task.score(task[0], text) < 0.5


def test_splits_do_not_overlap() -> None:
    (train, num_train), (test, num_test) = SPLITS["train"], SPLITS["test"]
    assert train + num_train <= test or test + num_test <= train
    tasks = [load_task("rg:chain_sum", split=split) for split in ("train", "test")]
    train_prompts, test_prompts = ({task[index].prompt[1]["content"] for index in range(100)} for task in tasks)
    assert not train_prompts & test_prompts


def test_invalid_indices_and_references_are_errors() -> None:
    task = load_task("rg:leg_counting", split="test")
    for index in (-1, len(task)):
        with pytest.raises(IndexError):
            task[index]
        with pytest.raises(KeyError):
            task.resolve(PromptRef(task.name, "test", index))
    with pytest.raises(KeyError):
        task.resolve(PromptRef(task.name, "train", 0))


def test_a_task_is_pickled_without_its_problems() -> None:
    task = ReasoningGymTask("leg_counting", "test")
    before = task[5]
    pickled = pickle.dumps(task)
    assert len(pickled) < 500
    assert pickle.loads(pickled)[5] == before


@pytest.mark.parametrize("generator", REFUSED)
def test_an_unusable_generator_is_an_error_with_the_reason(generator: str) -> None:
    with pytest.raises(TaskError, match=f"rg:{generator} cannot be used: "):
        load_task(f"rg:{generator}")


IN_ANOTHER_PROCESS = """
import json, random, sys
from ftis_node.tasks import load_task
random.seed(7)
tasks = {name: load_task(f"rg:{name}", split="test") for name in reversed(json.loads(sys.argv[1]))}
json.dump({name: [task[i].prompt[1]["content"] for i in (9, 4, 0)] for name, task in tasks.items()}, sys.stdout)
"""


def test_another_process_has_the_same_prompts() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, json.dumps(SAMPLE)],
        env=os.environ | {"PYTHONHASHSEED": "4242"},
        capture_output=True,
        check=True,
    )
    tasks = {name: load_task(f"rg:{name}", split="test") for name in SAMPLE}
    here = {name: [task[index].prompt[1]["content"] for index in (9, 4, 0)] for name, task in tasks.items()}
    assert json.loads(result.stdout) == here
