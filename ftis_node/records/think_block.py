"""Think blocks at the border between a model's prompt and its answer.

Some chat templates write the beginning of the answer themselves. It is `<think>` for a model that always reasons, or an
empty block for one that must not. The completion then lacks these tags. So the score is that of the *opening*, which is
what the template wrote, and the completion together. A group carries its sender's opening, and a learner trains on the
completion after its own prompt with that opening.
"""

from __future__ import annotations

import re
from typing import Final

THINK: Final = "<think>"
THINK_END: Final = "</think>"
ANSWER_TAGS: Final = (THINK, THINK_END, "<answer>", "</answer>")
"""The tags of the answer format. A tokenizer may have a special token for each."""
_OPENING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def split_opening(prompt: str) -> tuple[str, str]:
    """Return the prompt without its opening, and the opening: empty, or an open or an empty think block."""
    found = _OPENING.search(prompt)
    return (prompt[: found.start()], found.group()) if found else (prompt, "")


def is_opening(text: str) -> bool:
    """Return whether a peer's text may be an opening."""
    return not text or _OPENING.fullmatch(text) is not None


def whole_answer(opening: str, completion_text: str) -> str:
    """Return the text that is scored. A completion that reasons after an empty block counts without that block."""
    if THINK_END in opening and THINK in completion_text:
        return completion_text
    return opening + completion_text


def after_thinking(text: str) -> str:
    """Return the text after a leading think block, for tasks whose answer has no tags.

    The block counts as part of the answer if it never ends.
    """
    reasoning, end, answer = text.partition(THINK_END)
    return answer if end and reasoning.lstrip().startswith(THINK) else text.lstrip().removeprefix(THINK)
