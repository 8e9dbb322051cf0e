"""The grammar of a task spec: what stands for what, where a path ends, and when two specs are one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.errors import TaskError
from ftis_node.tasks.spec import TaskPart, TaskSpec, parse_spec


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("arithmetic", [TaskPart("arithmetic")]),
        ("arithmetic:add", [TaskPart("arithmetic:add")]),
        (" gsm8k ", [TaskPart("gsm8k")]),
        ("gsm8k=7", [TaskPart("gsm8k")]),
        ("rg:chain_sum", [TaskPart("rg:chain_sum")]),
        ("my-task", [TaskPart("my-task")]),
        ("my-task@brief+rg:ab@brief=2", [TaskPart("my-task@brief"), TaskPart("rg:ab@brief", weight=2)]),
        ("arithmetic+gsm8k@brief:a/b@c.jsonl", [TaskPart("arithmetic"), TaskPart("gsm8k@brief", "a/b@c.jsonl")]),
        ("gsm8k:/a+b@c.jsonl", [TaskPart("gsm8k", "/a+b@c.jsonl")]),
        ("gsm8k:data/train.jsonl", [TaskPart("gsm8k", "data/train.jsonl")]),
        ("gsm8k=3+rg:chain_sum=1", [TaskPart("gsm8k", weight=3), TaskPart("rg:chain_sum")]),
        ("rg:chain_sum+gsm8k=1.5", [TaskPart("gsm8k", weight=3), TaskPart("rg:chain_sum", weight=2)]),
        ("gsm8k=0.2+math500=0.8", [TaskPart("gsm8k"), TaskPart("math500", weight=4)]),
        ("math500:/b+gsm8k:/a", [TaskPart("gsm8k", "/a"), TaskPart("math500", "/b")]),
    ],
)
def test_what_a_spec_means(text: str, parts: list[TaskPart]) -> None:
    assert parse_spec(text) == TaskSpec(tuple(parts))


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("gsm8k:/a:b/train.jsonl", "/a:b/train.jsonl", 1),
        ("gsm8k:/a+b/train.jsonl", "/a+b/train.jsonl", 1),
        ("gsm8k:/c++/train.jsonl", "/c++/train.jsonl", 1),
        ("gsm8k:/a+b.jsonl=2+arithmetic", "/a+b.jsonl", 2),
        ("gsm8k:/lr=3e-5/train.jsonl", "/lr=3e-5/train.jsonl", 1),
        ("gsm8k:/lr=3=1", "/lr=3", 1),
        ("gsm8k:/lr=3=2+arithmetic", "/lr=3", 2),
        ("gsm8k:/with space/ä.jsonl", "/with space/ä.jsonl", 1),
    ],
)
def test_how_far_a_path_reaches(text: str, path: str, weight: int) -> None:
    spec = parse_spec(text)
    part = next(part for part in spec.parts if part.name == "gsm8k")
    assert (part.path, part.weight) == (path, weight)
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the task is empty"),
        ("gsm8k+", "'gsm8k+' is not a task"),
        ("+gsm8k", "'' is not a task"),
        ("gsm8k:", "'gsm8k:' names no file: write gsm8k:PATH"),
        ("gsm8k=0", "has the weight 0"),
        ("gsm8k=-1", "'gsm8k=-1' is not a task"),
        ("gsm8k=many", "'gsm8k=many' is not a task"),
        ("rg:", "'rg:' is not a task"),
        ("rg:a:b", "'rg:a:b' is not a task"),
        ("8k", "'8k' is not a task"),
        ("gsm8k:/a+gsm8k:/b", "task 'gsm8k' appears twice"),
        ("gsm8k=1000+arithmetic=1", "add up to 1,001, at most 1,000"),
    ],
)
def test_malformed_specs_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_spec(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_canonical_forms_hide_paths_order_and_scale() -> None:
    spec = parse_spec("rg:chain_sum=2+gsm8k:/data/a=6")
    assert spec.canonical == "gsm8k=3+rg:chain_sum"
    assert spec.paths == {"gsm8k": "/data/a"}
    assert spec.canonical == parse_spec("gsm8k=3+rg:chain_sum").canonical
    assert parse_spec(spec.canonical).paths == {}
    assert str(spec) == "gsm8k:/data/a=3+rg:chain_sum"


@given(st.text(alphabet="arg8k:+=./ 01mh5", max_size=40))
def test_any_text_is_a_spec_that_reads_back_or_a_task_error(text: str) -> None:
    try:
        spec = parse_spec(text)
    except TaskError:
        return
    assert parse_spec(str(spec)) == spec
    assert parse_spec(spec.canonical).canonical == spec.canonical
