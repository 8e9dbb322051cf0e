r"""Limits of an answer: an answer that is too costly for a parser is wrong without parsing; ordinary answers pass.

`ORDINARY` is a sample; `python -m tests.tasks.test_answer_limits FILE...` checks whole data sets.
"""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from ftis_node.records.group import CompletionStatus
from ftis_node.tasks import load_task
from ftis_node.tasks.answers import answers_agree
from ftis_node.tasks.expression_limits import is_within_limits
from ftis_node.tasks.rg import is_safe_answer
from ftis_node.tasks.scorer import UNSCORED, IsolatedScorer, ScoringLimits
from tests.tasks.completions import COSTLY_ANSWERS, COSTLY_WITHIN_LIMITS, think_answer

SCORED = CompletionStatus.SCORED
MAX_S = 0.1
ORDINARY = (
    *("72", "-3", "1,080", "0.5", "$18", "10 apples", "The answer is $72$.", r"\boxed{72}", "1234567.89", "50\\%"),
    *(r"\left( 3, \frac{\pi}{2} \right)", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", "p - q", "(3,4]"),
    *("x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1", r"11,\! 111,\! 111,\! 100", r"(-\infty, 2) \cup (3, \infty)"),
    *(r"\frac{3 + \sqrt{17}}{4}", r"2^{2005}", r"3^{100} - 1", r"\binom{10}{3}", "10!"),
    *(r"\frac{12!}{5! 7!}", "(x+1)^{10}"),
    *(r"\sqrt[3]{2} + \sqrt{5}", r"\sin^2 x + \cos^2 x", r"e^{-x^2}", r"\log_2 3", r"\log_{10} 1000000", "90^\\circ"),
    *(r"\text{Evelyn}", "6 - 5i"),
    *(r"\frac{1}{1 + \frac{1}{2}}", r"|x - 3|", "x = 5", r"\{1, 2, 3, 5, 7\}", "(x+y+z)^4", r"\frac{(n+1)!}{2}", "n!"),
    *("$$x^3+3x-6$$", r"\[ \boxed{\frac{9}{7}} \]"),
    *(r"\begin{pmatrix} 1 & 0 & 0 \\ 0 & 1 & 0 \\ 0 & 0 & 1 \end{pmatrix}",),
    *(r"|x - 3| + |y|^2", r"\lfloor 3.7 \rfloor^2"),
    *(r"(x-2)(x+2)(x^2+4)", r"x^{1/3}", r"4\pi r^2 h", r"2\sqrt{2 + \sqrt{3}}"),
    *("1.5 \\times 10^{12}", "12*51 - 37 - 94"),
)  # fmt: skip


def test_ordinary_answers_are_within_the_limits():
    assert [answer for answer in ORDINARY if not is_within_limits(answer)] == []


@pytest.mark.parametrize("costly", COSTLY_ANSWERS)
def test_a_costly_answer_is_wrong_without_parsing(costly):
    began = time.process_time()
    assert not is_within_limits(costly)
    for answer in (costly, f"${costly}$", f"\\boxed{{{costly}}}"):
        assert not answers_agree("72", answer)
        assert not answers_agree("x^2 + 1", answer)
    assert time.process_time() - began < MAX_S


async def test_the_scoring_process_ends_at_a_costly_answer_within_the_limits(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "What is x + 1?", "answer": "#### x + 1"}) + "\n")
    task = load_task(f"gsm8k:{tmp_path}/x.jsonl")
    texts = [think_answer(answer) for answer in ("1 + x", COSTLY_WITHIN_LIMITS, "1 + x")]
    async with IsolatedScorer(task, limits=ScoringLimits(time_limit_s=1.5)) as scorer:
        assert await scorer.score(task[0], texts) == [(1.0, SCORED), UNSCORED, (1.0, SCORED)]


def test_the_limits_hold_for_the_parsed_tasks_of_reasoning_gym():
    assert not is_safe_answer("simple_integration", "9**9**9", reference="x")
    assert is_safe_answer("simple_integration", "x**9", reference="x")


def _answers(file: Path) -> list[str]:
    """Return the reference of each line, and each boxed answer in its solution."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    references = [row["answer"].rpartition("####")[2].strip() for row in rows]
    box = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    return references + [boxed for row in rows for boxed in re.findall(box, row.get("solution", ""))]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        answers = _answers(Path(name))
        forms = [form.format(answer) for answer in answers for form in ("{}", "${}$", r"\boxed{{{}}}", "It is ${}$.")]
        outside = [answer for answer in forms if not is_within_limits(answer)]
        counts = f"{len(answers)} answers, {len(forms)} forms, {len(outside)} beyond the limits"
        print(f"{name}: {counts}: {outside[:5]}")  # noqa: T201
