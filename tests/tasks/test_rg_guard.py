"""No answer runs as code: a guard precedes every verifier of reasoning-gym that evaluates answers."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING

import pytest

from ftis_node.tasks import load_task
from ftis_node.tasks.rg import EVALUATED, PARSED, REFUSED, is_safe_answer
from tests.tasks.completions import think_answer

if TYPE_CHECKING:
    from pathlib import Path

EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify", "S", "__import__"}

HARMLESS = {
    "bitwise_arithmetic",  # evaluates the problem, not the answer
    "propositional_logic",  # its own parser has the name of an evaluator
}


@pytest.mark.parametrize("generator", sorted(EVALUATED | PARSED))
def test_code_in_an_answer_does_not_run(generator: str, tmp_path: Path) -> None:
    task = load_task(f"rg:{generator}")
    mark = tmp_path / "mark"
    for code in (f"open({str(mark)!r}, 'w')", f"__import__('pathlib').Path({str(mark)!r}).touch()"):
        for answer in (code, f"[{code}]", f'sympify("{code}")', f"(lambda: {code})()"):
            assert task.score(task[0], think_answer(answer)) < 0.1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("string_insertion", "oracle_answer"),
        ("string_insertion", "entry['answer']"),
        ("spiral_matrix", "oracle_answer.split()"),
        ("spiral_matrix", "[0 for entry['answer'] in ['x']]"),
        ("n_queens", "entry['metadata']['valid_answers'][0]"),
        ("simple_integration", "Integral(integrand, x)"),
        ("simple_integration", "metadata"),
        ("intermediate_integration", "Integral(2*x) + C"),
        ("countdown", "S('1')"),
        ("countdown", "x.__class__"),
        ("countdown", "[1]"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "NaN + NaNi"),
        ("chain_sum", "9" * 20_001),
    ],
)
def test_an_unsafe_answer_is_rejected(generator: str, answer: str) -> None:
    assert not is_safe_answer(generator, answer, reference="A")


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("string_insertion", "BABCACE"),
        ("string_insertion", "['B', 'A']"),
        ("spiral_matrix", "0 2 2 2 5"),
        ("spiral_matrix", "[0, 2, 2]"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("n_queens", "_ Q _ _\n_ _ _ Q"),
        ("simple_integration", "3*X**7 + 5*X**5 + C"),
        ("intermediate_integration", "-2*x*asin(x) - 2*sqrt(1 - x**2) + C"),
        ("countdown", "10*(28 - 42 + 87) - 40.5"),
        ("chain_sum", "open('anything')"),
    ],
)
def test_a_safe_answer_is_accepted(generator: str, answer: str) -> None:
    assert is_safe_answer(generator, answer, reference="BABCACE")


def test_every_evaluating_verifier_is_listed() -> None:
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
