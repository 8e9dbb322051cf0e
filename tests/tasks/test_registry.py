"""Loading a task by its spec: built-in names and unknown names."""

import pytest

from ftis_node.errors import TaskError
from ftis_node.tasks import Task, held_out_spec, load_task


@pytest.mark.parametrize("spec", ["arithmetic", "arithmetic:add", "arithmetic:sub", "rg:leg_counting"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_built_in_task_without_a_file_is_loaded(spec, split):
    task = load_task(spec, split=split)
    assert isinstance(task, Task)
    assert (task.name, task.split) == (spec, split)
    assert task.resolve(task[0].ref) == task[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", "unknown task 'gsm9k': known are arithmetic, "),
        ("gsm9k", "did you mean 'gsm8k'?"),
        ("arithmatic", "did you mean 'arithmetic'?"),
        ("arithmetic:mul", "unknown task 'arithmetic:mul': use arithmetic, arithmetic:add, "),
        ("sums:short", "unknown task 'sums:short': use sums, sums:long"),
        ("rg", "unknown task 'rg'"),
        ("rg:chian_sum", "unknown task 'rg:chian_sum': reasoning-gym has rg:chain_sum"),
        ("rg:zzzzzzzz", "reasoning-gym has rg:ab, rg:acre, "),
        ("rg:codeio", "rg:codeio cannot be used: its problems differ from process to process"),
        ("arithmetic+rg:composite", "rg:composite cannot be used"),
        ("math500", "math500 is for evaluation, it has no split 'train'"),
    ],
)
def test_a_task_without_training_problems_is_a_one_line_error(spec, message):
    with pytest.raises(TaskError) as caught:
        load_task(spec, split="train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_split_is_an_error():
    with pytest.raises(TaskError, match="unknown split 'validation'"):
        load_task("arithmetic", split="validation")


def test_the_held_out_spec_has_the_parts_with_a_test_split(tmp_path):
    file = tmp_path / "train.jsonl"
    file.touch()
    assert str(held_out_spec("arithmetic:add")) == "arithmetic:add"
    assert str(held_out_spec("gsm8k=3+rg:chain_sum")) == "gsm8k=3+rg:chain_sum"
    assert held_out_spec(f"gsm8k:{file}") is None
    assert held_out_spec(f"gsm8k:{tmp_path}") is None
    assert str(held_out_spec(f"gsm8k:{tmp_path}+arithmetic=2")) == "arithmetic"
    (tmp_path / "test.jsonl").touch()
    assert str(held_out_spec(f"gsm8k:{tmp_path}")) == f"gsm8k:{tmp_path}"
    assert held_out_spec("some-plugin") is None
