"""Chat format of the reasoning tasks: reasoning inside <think> </think>, then the answer inside <answer> </answer>.

The format is part of the reward (F-TIS paper, after DeepSeek-R1): a completion that breaks it scores 0. It allows one
think block, one answer block and white space, because models learn to write whatever a looser rule accepts. A valid
completion:

    <think> 48 / 2 = 24 clips in May, 48 + 24 = 72 together. </think>
    <answer> 72 </answer>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.tasks.base import ChatMessage

SYSTEM_PROMPT = (
    "You are an assistant that solves the user's problem. First reason about it step by step, then state the result. "
    "Write the reasoning inside <think> </think> tags and after it only the final answer inside <answer> </answer> "
    "tags, that is: <think> your reasoning </think> <answer> your final answer </answer>"
)

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def chat_prompt(problem: str) -> tuple[ChatMessage, ...]:
    """Return the messages that ask for `problem` in this format."""
    return (
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem},
    )


def final_answer(completion_text: str) -> str | None:
    """Return the stripped content of the answer block; None if the format is broken."""
    if any(completion_text.count(tag) != 1 for tag in _TAGS):
        return None
    before, _, rest = completion_text.partition("<think>")
    _, _, rest = rest.partition("</think>")
    between, _, rest = rest.partition("<answer>")
    answer, closing, after = rest.partition("</answer>")
    if not closing or before.strip() or between.strip() or after.strip():
        return None
    return answer.strip()
