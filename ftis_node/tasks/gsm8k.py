"""GSM8K: grade-school word problems whose answers are whole numbers (arXiv 2110.14168, MIT license).

A line of the file, shortened; the number after `####` is the reference, thousands separators removed:

    {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\\nNatalia sold ... altogether ...\\n#### 72"}

    "<think> 48 + 24 </think> <answer> 72 clips </answer>"   reward 1
    "<think> 48 + 24 </think> <answer> 71 </answer>"         reward 0
    "The answer is 72."                                      reward 0: the format is part of the task
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from ftis_node.tasks.math.dataset import MathTask
from ftis_node.tasks.problems import Problem, text_field

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Gsm8kTask(MathTask):
    """7,473 training and 1,319 test problems; with a PATH any file of the same format."""

    name = "gsm8k"
    hub_name: ClassVar[str] = "openai/gsm8k"
    hub_config: ClassVar[str] = "main"
    hub_splits: ClassVar[tuple[str, ...]] = ("train", "test")

    @staticmethod
    def read_row(row: dict[str, Any]) -> Problem:
        _, marker, number = text_field(row, "answer").rpartition("####")
        number = number.strip().replace(",", "")
        if not marker or not _NUMBER.fullmatch(number):
            raise ValueError("the field 'answer' must end in '#### N' with a number N")
        return Problem(text_field(row, "question"), number)
