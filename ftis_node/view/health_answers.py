"""Three answers at the top of the screen: contributing, learning, healthy.

They are those of `telemetry/health_summary.py`. The screen adds what a status document lacks: trends, a stalled
learner, the memory of the machine, a node that does not answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ftis_node.telemetry.health_summary import (
    AnswerWord,
    HealthAnswer,
    HealthSummary,
    duration,
    refusal_facts,
    summarize_health,
)
from ftis_node.telemetry.status import RefusalStatus
from ftis_node.telemetry.terminal_text import date_time
from ftis_node.view.formats import ago
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Line, Span, Tone, labeled, line

LABEL_WIDTH, WORD_WIDTH = 14, 9
MIN_STEPS = 8  # with fewer, a trend is noise
CLEAR_ERRORS = 2.0  # two means differ if they are more standard errors apart
STALL_FACTOR, STALL_AT_LEAST_S = 10.0, 120.0
RAM_FULL = 0.95
TONES = {
    AnswerWord.YES: Tone.GOOD,
    AnswerWord.FINISHED: Tone.GOOD,
    AnswerWord.NOT_YET: Tone.WARN,
    AnswerWord.NO: Tone.BAD,
    AnswerWord.NOT_APPLICABLE: Tone.FAINT,
    AnswerWord.PAUSED: Tone.WARN,
    AnswerWord.STOPPED: Tone.FAINT,
}


def health_of(snapshot: NodeSnapshot) -> HealthSummary:
    health = summarize_health(snapshot.status, now=snapshot.taken_at)
    if snapshot.is_silent:
        silent = HealthAnswer(AnswerWord.NO, "it runs and does not answer", f"see {snapshot.logs}")
        return health._replace(healthy=silent)
    return health


def answer_lines(snapshot: NodeSnapshot) -> tuple[Line, Line, Line]:
    """Return a line for each answer; the first two of a node that is not live are faint."""
    health = health_of(snapshot)
    shares, learns, is_well = health
    swarm = snapshot.status.swarm
    if snapshot.has_ended:
        shared = f"not running; {swarm.groups_sent:,} groups sent, {swarm.groups_confirmed:,} confirmed"
        state = f"{is_well.why}, {ago(snapshot.status.health.taken_at, snapshot.taken_at)} ago"
    else:
        shared, state = _text(shares), _text(is_well, with_advice=True)
    learned = learning_trend(snapshot) if snapshot.has_ended or learns.word is AnswerWord.YES else _text(learns)
    tone = TONES[is_well.word]
    if found := problems(snapshot):
        state = found[0] + (f" (and {len(found) - 1} more: `?`)" if len(found) > 1 else "")
        tone = Tone.WARN if is_well.is_well else Tone.BAD
    elif is_well.word is AnswerWord.YES:
        state = f"{swarm.state}: {swarm.reason}"
    return (
        _line("contributing", shares.word, shared, TONES[shares.word] if snapshot.is_live else Tone.FAINT),
        _line("learning", learns.word, learned, TONES[learns.word] if snapshot.is_live else Tone.FAINT),
        _line("healthy", is_well.word, state, tone),
    )


def _line(question: str, word: AnswerWord, why: str, tone: Tone) -> Line:
    return labeled(question, Span(word.ljust(WORD_WIDTH) + " ", tone), why, width=LABEL_WIDTH)


def _text(answer: HealthAnswer, *, with_advice: bool = False) -> str:
    has_advice = answer.advice and (with_advice or not answer.is_well)
    return f"{answer.why}: {answer.advice}" if has_advice else answer.why


def learning_trend(snapshot: NodeSnapshot) -> str:
    """Return the step, the trend of the reward, and pass@1 of the task that was evaluated last."""
    rewards = [point.reward_mean for point in snapshot.history.steps if point.reward_mean is not None]
    step = f"step {snapshot.status.learner.step}"
    if len(rewards) < MIN_STEPS:
        return f"{step}; the trend shows after {MIN_STEPS} steps"
    first, last, direction = trend(rewards)
    evaluations = snapshot.history.evaluations
    same = [point.pass_at_1 for point in evaluations if point.task == evaluations[-1].task]
    passes = f", pass@1 {same[0]:.2f} -> {same[-1]:.2f}" if same else ""
    return f"{step}, reward {direction} {first:.2f} -> {last:.2f}{passes}"


def trend(values: Sequence[float]) -> tuple[float, float, str]:
    """Return the means of the first and of the last quarter, and `up`, `flat` or `down`.

    Two means differ if they are more than CLEAR_ERRORS standard errors apart.
    """
    quarter = max(2, len(values) // 4)
    head, tail = values[:quarter], values[-quarter:]
    first, last = statistics.fmean(head), statistics.fmean(tail)
    error = ((statistics.variance(head) + statistics.variance(tail)) / quarter) ** 0.5
    if abs(last - first) <= CLEAR_ERRORS * error:
        return first, last, "flat"
    return first, last, "up" if last > first else "down"


def problems(snapshot: NodeSnapshot) -> list[str]:
    """Return the problems of a running node with their remedies, the worst first."""
    if not snapshot.is_live:
        return []
    machine = snapshot.machine
    answer = health_of(snapshot).healthy
    found = [] if answer.is_well else [_text(answer)]
    learning = health_of(snapshot).learning
    if learning.word is AnswerWord.YES and learning.advice:
        found.append(_text(learning, with_advice=True))
    if (stalled_s := _stalled_s(snapshot)) is not None:
        found.append(f"no step for {duration(stalled_s)}: are groups ready? press `g`")
    if machine.ram_total_bytes and machine.ram_used_bytes > RAM_FULL * machine.ram_total_bytes:
        found.append("memory is nearly full: `ftis-node doctor` suggests settings that fit")
    return found


def _stalled_s(snapshot: NodeSnapshot) -> float | None:
    """Return the seconds since the last step or pause if they far exceed the usual time of a step, else None."""
    times = [point.time for point in snapshot.history.steps[-MIN_STEPS:]]
    pause = snapshot.status.pause
    if len(times) < MIN_STEPS or pause.reason:
        return None
    usual_s = (times[-1] - times[0]) / (len(times) - 1)
    began_at = max(snapshot.taken_at - snapshot.status.node.uptime_s, pause.resumed_at or 0.0)
    waited_s = snapshot.taken_at - max(times[-1], began_at)
    return waited_s if waited_s > max(STALL_AT_LEAST_S, STALL_FACTOR * usual_s) else None


def answer_texts(snapshot: NodeSnapshot) -> list[tuple[Tone, str]]:
    """Return cause and remedy of each answer that is not yes or has advice. A cause of two answers appears once."""
    found: dict[str, tuple[Tone, str]] = {}
    for question, answer in health_of(snapshot).items():
        if answer.advice or answer.word is not AnswerWord.YES:
            found.setdefault(answer.why, (TONES[answer.word], f"{question}: {_text(answer, with_advice=True)}"))
    return list(found.values())


def refusal_texts(snapshot: NodeSnapshot, *, limit: int | None = None) -> list[tuple[Tone, str]]:
    """Return who refuses this node's groups, and whose groups it refuses, with what to do; `limit` of each."""
    found = []
    for tone, what, refusals in _refusals(snapshot):
        for refusal in refusals[:limit]:
            facts = refusal_facts(refusal, now=snapshot.taken_at)
            found.append((tone, f"{what} {facts}: {refusal.advice}"))
        if limit is not None and len(refusals) > limit:
            found.append((tone, f"{what} {len(refusals) - limit} more peers: see status --json"))
    return found


def _refusals(snapshot: NodeSnapshot) -> tuple[tuple[Tone, str, list[RefusalStatus]], ...]:
    swarm = snapshot.status.swarm
    return (
        (Tone.BAD, "its groups are refused by", swarm.refused_by),
        (Tone.WARN, "it refuses the groups of", swarm.refused_peers),
    )


def next_lines(snapshot: NodeSnapshot) -> tuple[Line, ...]:
    """Return the command that starts a stopped node again and the age of its values, or advice for a waiting node."""
    health = health_of(snapshot)
    if snapshot.has_ended:
        taken_at = snapshot.status.health.taken_at
        age = f"status of {date_time(taken_at)}" if taken_at else "it left no status"
        tone = Tone.PLAIN if health.healthy.is_well else Tone.WARN
        return (
            line(Span(f"{age}; start it again (? shows the whole command):", tone)),
            line("  ", Span(snapshot.start_command, Tone.STRONG)),
        )
    waits = [answer for answer in (health.learning, health.contributing) if answer.word is AnswerWord.NOT_YET]
    if not waits:
        return ()
    advice = waits[0].advice or "wait"
    if waits[0] is health.learning and snapshot.state == "running":
        usual_s = _usual_step_s(snapshot)
        advice += "; its time is not known yet" if usual_s is None else f"; a step usually takes {duration(usual_s)}"
    return (labeled("what now?", Span(advice, Tone.WARN), width=LABEL_WIDTH),)


def refusal_lines(snapshot: NodeSnapshot) -> list[Line]:
    """Return two lines for the first refusal of each direction: the facts, and what to do."""
    lines: list[Line] = []
    if snapshot.is_live:
        for label, (tone, _, refusals) in zip(("refused by", "refuses"), _refusals(snapshot), strict=True):
            for first in refusals[:1]:
                more = f" (and {len(refusals) - 1} more: `?`)" if len(refusals) > 1 else ""
                facts = f"{refusal_facts(first, now=snapshot.taken_at)}{more}"
                lines += [labeled(label, Span(facts, tone), width=LABEL_WIDTH)]
                lines += [labeled("", first.advice, width=LABEL_WIDTH)]
    return lines


def _usual_step_s(snapshot: NodeSnapshot) -> float | None:
    times = [point.time for point in snapshot.history.steps[-MIN_STEPS:]]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return statistics.median(gaps) if gaps else None


def worst_tone(snapshot: NodeSnapshot) -> Tone:
    tones = [TONES[answer.word] for answer in health_of(snapshot)]
    return next((tone for tone in (Tone.BAD, Tone.WARN, Tone.GOOD) if tone in tones), Tone.FAINT)
