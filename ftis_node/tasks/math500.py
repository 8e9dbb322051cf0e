r"""MATH-500: 500 competition problems for evaluation, the test set of arXiv 2305.20050 drawn from MATH (MIT license).

A line of the file, shortened; answers are LaTeX:

    {"problem": "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates. ...",
     "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Precalculus", "level": 2, ...}

    "<think> r = 3 </think> <answer> $(3, \pi/2)$ </answer>"   reward 1

There is a test split alone. MATH's own training problems have the same form: to train on them, give their file.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ftis_node.tasks.math.dataset import MathTask
from ftis_node.tasks.problems import Problem, text_field


class Math500Task(MathTask):
    """500 test problems; with a PATH any file of the same format."""

    name = "math500"
    hub_name: ClassVar[str] = "HuggingFaceH4/MATH-500"
    hub_config: ClassVar[str] = "default"
    hub_splits: ClassVar[tuple[str, ...]] = ("test",)

    @staticmethod
    def read_row(row: dict[str, Any]) -> Problem:
        return Problem(text_field(row, "problem"), text_field(row, "answer"))
