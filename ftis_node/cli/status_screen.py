"""The status of a node as lines for a terminal. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.telemetry.health_summary import AnswerWord, summarize_health
from ftis_node.telemetry.terminal_text import wrapped
from ftis_node.view.health_answers import answer_texts, refusal_texts
from ftis_node.view.node_facts import node_facts
from ftis_node.view.snapshot import MachineUsage, NodeSnapshot
from ftis_node.view.spans import Tone, labeled, text_lines

if TYPE_CHECKING:
    from ftis_node.telemetry.status import Status

WIDTH, WIDEST = 80, 99
MAX_REFUSALS = 2  # of each direction
ENDED_WELL = (AnswerWord.FINISHED, AnswerWord.STOPPED)


def screen(status: Status, *, now: float, width: int = WIDTH, machine: MachineUsage = MachineUsage()) -> list[str]:
    """Return the lines, each at most `width` cells wide. `now` is Unix time in seconds."""
    snapshot = NodeSnapshot(taken_at=now, status=status, machine=machine)
    health = summarize_health(status, now=now)
    explanations = refusal_texts(snapshot, limit=MAX_REFUSALS)
    if health.healthy.word in ENDED_WELL:
        texts = [f"{health.healthy.word}: {health.healthy.why}", health.healthy.advice]
    else:
        texts = ["   ".join(f"{question}: {answer.word}" for question, answer in health.items())]
        explanations = [*answer_texts(snapshot), *explanations]
    texts += [f"{'!' if tone is Tone.BAD else '-'} {text}" for tone, text in explanations]
    facts = node_facts(snapshot) if status.node.peer_id else ()  # without an id, the node has never started
    lines = [line for text in texts for line in wrapped(text, width, indent=2)]
    return [*lines, *text_lines((labeled(label, *shown) for label, shown in facts), width)]
