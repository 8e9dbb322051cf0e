"""Answers in completions, for majority votes. They are normalized, so that equal answers are equal text.

A task may have a method `answer_of(item, completion_text) -> str | None`. None means that the text has no answer, for
example because its format is broken. Without the method, the answer is the text with normalized white space. The reward
is not used, because it would reveal the right answer.

Answers in different notation count as different, unless the task normalizes them. To compare `1/2` with `0.5` would
need a parser, and untrusted text can keep a parser busy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.tasks.mixed import leaves

if TYPE_CHECKING:
    from ftis_node.tasks.base import Task, TaskItem

log = logging.getLogger(__name__)


def answer_in(task: Task, item: TaskItem, completion_text: str) -> str | None:
    """Return the answer of `completion_text` to `item`, a problem of `task`; None if it has none.

    Never raises: an exception of a plug-in counts as no answer.
    """
    leaf = next((one for one in leaves(task) if one.name == item.ref.task), task)
    answer_of = getattr(leaf, "answer_of", None)
    if answer_of is None:
        return plain_text(completion_text)
    try:
        answer = answer_of(item, completion_text)
    except Exception as error:  # third-party code on untrusted text
        log.warning("%s: no answer could be read: %r", item.ref, error)
        return None
    return answer if isinstance(answer, str) and answer else None


def plain_text(text: str) -> str | None:
    """Return `text` with single spaces between its words; None if it has no words."""
    return " ".join(text.split()) or None
