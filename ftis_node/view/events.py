"""Lines of the event log: time, event, details."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ftis_node.telemetry.health_summary import plural
from ftis_node.telemetry.history import ROUTINE
from ftis_node.telemetry.terminal_text import clipped
from ftis_node.view.formats import clock, number, short_id
from ftis_node.view.spans import Line, Span, Tone, line

TONES = {
    **dict.fromkeys("step eval start peer_joined".split(), Tone.STRONG),
    **dict.fromkeys("refused peer_refused refused_by reputation_changed pull_failed pull_given_up".split(), Tone.WARN),
    **dict.fromkeys("peer_left mismatch paused clock_moved checkpoint_fallback".split(), Tone.WARN),
    **dict.fromkeys("recovered understated".split(), Tone.WARN),
    **dict.fromkeys("step_lost generation_failed eval_failed weight_sync_failed check_failed".split(), Tone.BAD),
    **dict.fromkeys("audit_failed failed loop_blocked".split(), Tone.BAD),
}
MAX_DETAIL = 240
WORD_WIDTH = 11
GROUP_WIDTH = 12


def notable_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("event") not in ROUTINE]


def event_line(event: Mapping[str, Any]) -> Line:
    name = str(event.get("event", "?"))
    return line(
        Span(clock(float(event.get("time", 0.0))), Tone.FAINT),
        " ",
        Span(name.ljust(WORD_WIDTH), TONES.get(name, Tone.PLAIN)),
        " ",
        clipped(_detail(name, event), MAX_DETAIL),
    )


def _detail(name: str, event: Mapping[str, Any]) -> str:
    if name == "step":
        return _step(event)
    if name == "eval":
        figures = f"pass@1 {number(event.get('pass_at_1'))} ({event.get('n')} of {_of(event, 'task')})"
        return f"step {event.get('step')}: {figures}"
    if name == "admitted":
        turns = f", {plural(event['num_turns'], 'turn')}" if event.get("num_turns") else ""
        whose = "own group" if event.get("own") else f"from {short_id(_of(event, 'sender'))}"
        return f"{whose}, {_of(event, 'num_tokens')} tokens{turns}, reward {number(event.get('reward_mean'))}"
    if name == "taken":
        return f"by step {_of(event, 'step')}"
    if name == "refused":
        return f"{_of(event, 'reason')}: {_of(event, 'detail')} (from {short_id(str(event.get('origin') or '-'))})"
    fields = {key: value for key, value in event.items() if key not in ("time", "event") and value is not None}
    return "  ".join(
        f"{key.removeprefix('num_').replace('_', ' ')} {_value(key, value)}" for key, value in fields.items()
    )


def _step(event: Mapping[str, Any]) -> str:
    if problem := event.get("refused") or event.get("skipped"):
        return f"{event.get('step')} had no effect: {problem}"
    return (
        f"{event.get('step')}  reward {number(event.get('reward_mean'), digits=2)}, "
        f"loss {number(event.get('loss'), digits=2)}, {event.get('own_groups', 0)} own, "
        f"{event.get('foreign_groups', 0)} foreign, {number(event.get('duration_s'), digits=2)} s"
    )


def _of(event: Mapping[str, Any], key: str) -> str:
    return str(event.get(key) or "-")


def _value(key: str, value: Any) -> str:
    text = {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if key == "group":
        return text[:GROUP_WIDTH]
    if key in ("peer", "sender", "origin", "source"):
        return short_id(text)
    return number(value) if isinstance(value, float) else text
