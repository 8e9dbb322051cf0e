"""reasoning-gym's tasks have the same problems in every process, and score answers. No answer runs as code."""

import ast
import inspect
import json
import os
import pickle
import subprocess
import sys

import pytest

from ftis_node.errors import TaskError
from ftis_node.tasks import load_task
from ftis_node.tasks.rg import EVALUATED, PARSED, REFUSED, SPLITS, ReasoningGymTask, is_safe_answer
from tests.tasks.completions import think_answer

# Different kinds: text, numbers, boards, code-like answers, partial scores, problems generated at load.
SAMPLE = (
    "base_conversion basic_arithmetic binary_matrix calendar_arithmetic chain_sum complex_arithmetic countdown "
    "family_relationships knights_knaves leg_counting letter_counting maze n_queens simple_integration spell_backward "
    "string_insertion syllogism word_sorting"
).split()


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("generator", SAMPLE)
def test_the_reference_scores_one_only_in_the_format(generator, split):
    task = load_task(f"rg:{generator}", split=split)
    item = task[3]
    assert (task.resolve(item.ref), task.score(item, think_answer(item.answer))) == (item, 1.0)
    assert task.score(item, item.answer) == 0.0
    assert task.score(item, think_answer("zzz 7 qqq")) < 0.5


@pytest.mark.parametrize(
    "text", ["", "<answer>", think_answer("\ud800\x00"), think_answer("{" * 30_000), think_answer("1e400")]
)
@pytest.mark.parametrize("generator", ["countdown", "spiral_matrix", "graph_color", "complex_arithmetic"])
def test_malformed_text_does_not_raise(generator, text):
    task = load_task(f"rg:{generator}")
    assert 0.0 <= task.score(task[0], text) < 0.5


def test_splits_do_not_overlap():
    (train, num_train), (test, num_test) = SPLITS["train"], SPLITS["test"]
    assert train + num_train <= test or test + num_test <= train
    tasks = [load_task("rg:chain_sum", split=split) for split in ("train", "test")]
    train_prompts, test_prompts = ({task[index].prompt[1]["content"] for index in range(100)} for task in tasks)
    assert not train_prompts & test_prompts


def test_a_task_is_pickled_without_its_problems():
    task = ReasoningGymTask("test", "leg_counting")
    before = task[5]
    pickled = pickle.dumps(task)
    assert len(pickled) < 500
    assert pickle.loads(pickled)[5] == before


@pytest.mark.parametrize("generator", REFUSED)
def test_an_unusable_generator_is_an_error_with_the_reason(generator):
    with pytest.raises(TaskError, match=f"rg:{generator} cannot be used: "):
        load_task(f"rg:{generator}")


IN_ANOTHER_PROCESS = """
import json, random, sys
from ftis_node.tasks import load_task
random.seed(7)
tasks = {name: load_task(f"rg:{name}", split="test") for name in reversed(json.loads(sys.argv[1]))}
json.dump({name: [task[i].prompt[1]["content"] for i in (9, 4, 0)] for name, task in tasks.items()}, sys.stdout)
"""


def test_another_process_has_the_same_prompts():
    result = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, json.dumps(SAMPLE)],
        env=os.environ | {"PYTHONHASHSEED": "4242"},
        capture_output=True,
        check=True,
    )
    tasks = {name: load_task(f"rg:{name}", split="test") for name in SAMPLE}
    here = {name: [task[index].prompt[1]["content"] for index in (9, 4, 0)] for name, task in tasks.items()}
    assert json.loads(result.stdout) == here


# A guard precedes every verifier of the library that evaluates answers.
EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify", "S", "__import__"}

HARMLESS = {
    "bitwise_arithmetic",  # evaluates the problem, not the answer
    "propositional_logic",  # its own parser has the name of an evaluator
}


@pytest.mark.parametrize("generator", sorted(EVALUATED | PARSED))
def test_code_in_an_answer_does_not_run(generator, tmp_path):
    task = load_task(f"rg:{generator}")
    mark = tmp_path / "mark"
    for code in (f"open({str(mark)!r}, 'w')", f"__import__('pathlib').Path({str(mark)!r}).touch()"):
        for answer in (code, f"[{code}]", f'sympify("{code}")', f"(lambda: {code})()"):
            assert task.score(task[0], think_answer(answer)) < 0.1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("string_insertion", "oracle_answer"), ("string_insertion", "entry['answer']"),
        ("spiral_matrix", "oracle_answer.split()"), ("spiral_matrix", "[0 for entry['answer'] in ['x']]"),
        ("n_queens", "entry['metadata']['valid_answers'][0]"), ("simple_integration", "Integral(integrand, x)"),
        ("simple_integration", "metadata"), ("intermediate_integration", "Integral(2*x) + C"), ("countdown", "S('1')"),
        ("countdown", "1*2*(E-E) + (E+E)/E"),
        ("countdown", "x.__class__"), ("countdown", "[1]"), ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "NaN + NaNi"), ("chain_sum", "9" * 20_001),
    ],
)  # fmt: skip
def test_an_unsafe_answer_is_refused(generator, answer):
    assert not is_safe_answer(generator, answer, reference="A")


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("string_insertion", "BABCACE"), ("string_insertion", "['B', 'A']"), ("spiral_matrix", "0 2 2 2 5"),
        ("spiral_matrix", "[0, 2, 2]"), ("binary_matrix", "[[0, 1], [1, 0]]"), ("n_queens", "_ Q _ _\n_ _ _ Q"),
        ("simple_integration", "3*X**7 + 5*X**5 + C"),
        ("intermediate_integration", "-2*x*asin(x) - 2*sqrt(1 - x**2) + C"),
        ("countdown", "10*(28 - 42 + 87) - 40.5"), ("chain_sum", "open('anything')"),
    ],
)  # fmt: skip
def test_a_safe_answer_is_accepted(generator, answer):
    assert is_safe_answer(generator, answer, reference="BABCACE")


def test_every_evaluating_verifier_is_listed():
    from reasoning_gym.factory import DATASETS

    evaluating = {name for name, (dataset, _) in DATASETS.items() if _evaluates(dataset)}
    assert evaluating - set(REFUSED) - HARMLESS == EVALUATED | PARSED


def _evaluates(dataset: type) -> bool:
    """Return whether `score_answer`, or a function of its module that it calls, evaluates a text of the answer."""
    module = inspect.getmodule(dataset)
    assert module
    tree = ast.parse(inspect.getsource(module))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    pending, seen = ["score_answer"], set()
    while pending:
        seen.add(name := pending.pop())
        nodes = ast.walk(functions[name]) if name in functions else ()
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called in EVALUATORS and not ast.unparse(call.args[0]).startswith(("entry[", "metadata[")):
                return True
            if called not in seen:
                pending.append(called)
    return False
