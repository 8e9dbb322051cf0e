"""Problems with verifiable rewards, one file a task. Importing this package loads no task and no library of one.

base.py               protocol of a task; several tasks as one
spec.py               grammar of a task SPEC; a node's domain as parts of it
registry.py           from a SPEC to the task
plugins.py            tasks and rewards of other packages
arithmetic.py         sums and differences, for swarms on two CPU cores
sums.py               sums with working, for swarms on two CPU cores
words.py              sums and word problems in plain English, for small language models
problems.py           problems by index
episodes/             tasks of several turns
dataset_query.py      QUERY of a `dataset:` task: columns, rewards, source, digest; its regular expressions (RE2);
                      the queries of GSM8K and MATH-500
dataset_rows.py       rows of a file or of the hub, read in a child process; problems, their digest, the held-out split
dataset_hub.py        rows of a data set of the hub, in that process
dataset_task.py       the task; its rewards: format, exact, math, regex, those of plug-ins; digest of a run's data sets
rg.py                 reasoning-gym's generators; no answer is run as code
answers.py            chat format of reasoning tasks, equality of answers, the answer in a completion for votes
number_answers.py     answers that are plain numbers
expression_limits.py  limits on answers that a parser reads
scorer.py             scores from a separate process, under limits
scoring_worker.py     that process
"""

from __future__ import annotations

from ftis_node.tasks.base import ChatMessage, Task, TaskItem, grader_releases
from ftis_node.tasks.registry import held_out_spec, load_task
from ftis_node.tasks.spec import TaskPart, TaskSpec, is_domain, parse_parts, parse_spec, validated_domain

__all__ = [
    "ChatMessage",
    "Task",
    "TaskItem",
    "TaskPart",
    "TaskSpec",
    "grader_releases",
    "held_out_spec",
    "is_domain",
    "load_task",
    "parse_parts",
    "parse_spec",
    "validated_domain",
]
