"""The answer in a completion, in a form in which equal answers are equal text: what models vote with.

A task may have a method `answer_of(item, completion_text) -> str | None`, None where the text holds no answer (a broken
format, say). Where it has none, the text itself is the answer, its white space normalised. The reward is not asked: it
would tell which answer is right.

Two answers that are written differently count as two, unless the task's own form makes them one: whether `1/2` and
`0.5` are equal is a question for a parser that hostile text may keep busy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.tasks.mixed import leaves

if TYPE_CHECKING:
    from ftis_node.tasks.base import Task, TaskItem

log = logging.getLogger(__name__)


def answer_in(task: Task, item: TaskItem, completion_text: str) -> str | None:
    """The answer of `completion_text` to `item`, which is a problem of `task`; None: there is none.

    Never raises: what a plug-in stumbles over is no answer.
    """
    leaf = next((one for one in leaves(task) if one.name == item.ref.task), task)
    answer_of = getattr(leaf, "answer_of", None)
    if answer_of is None:
        return plain_text(completion_text)
    try:
        answer = answer_of(item, completion_text)
    except Exception as error:  # somebody else's code over arbitrary text
        log.warning("%s: no answer could be read: %r", item.ref, error)
        return None
    return answer if isinstance(answer, str) and answer else None


def plain_text(text: str) -> str | None:
    """`text` with single spaces between its words; None where there are none."""
    return " ".join(text.split()) or None
