"""Three answers at the top of the screen: contributing, learning, healthy.

The terms are those of `telemetry/health_summary.py`. The screen adds what a status document lacks: the curves and the
machine.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from ftis_node.dashboard.snapshot import NodePhase
from ftis_node.dashboard.view.spans import (
    Line,
    Span,
    Tone,
    ago,
    count,
    labeled,
    line,
    percent,
)
from ftis_node.telemetry.health_summary import OFF, AnswerWord, duration, summarize_health
from ftis_node.telemetry.status import starting, stopped
from ftis_node.telemetry.terminal_text import date_time, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.telemetry.health_summary import HealthAnswer, HealthSummary

LABEL_WIDTH, WORD_WIDTH = 14, 9
MIN_STEPS = 8  # with fewer, a trend is noise
CLEAR_ERRORS = 2.0  # two means differ if they are more standard errors apart
STALL_FACTOR, STALL_AT_LEAST_S = 10.0, 120.0
RAM_FULL = 0.95


def answer_lines(snapshot: NodeSnapshot) -> tuple[Line, Line, Line]:
    return contributing(snapshot), learning(snapshot), healthy(snapshot)


def health_of(snapshot: NodeSnapshot) -> HealthSummary:
    """Return the health by the status document, adjusted if the node is starting or no longer runs."""
    status = snapshot.status
    if snapshot.phase is NodePhase.STARTING:
        status = starting(status)
    elif snapshot.phase is NodePhase.STOPPED:
        status = stopped(status)
    return summarize_health(msgspec.to_builtins(status), now=snapshot.taken_at)


def problem_text(answer: HealthAnswer) -> str:
    """Return the reason and the remedy; text from peers is printable."""
    return printable(f"{answer.why}: {answer.advice}" if answer.advice else answer.why)


TONES = {
    AnswerWord.YES: Tone.GOOD,
    AnswerWord.FINISHED: Tone.GOOD,
    AnswerWord.NOT_YET: Tone.WARN,
    AnswerWord.NO: Tone.BAD,
    AnswerWord.NOT_APPLICABLE: Tone.FAINT,
    AnswerWord.STOPPED: Tone.FAINT,
}


def _answer(question: str, word: AnswerWord, why: str, *, tone: Tone | None = None) -> Line:
    return labeled(question, Span(word.ljust(WORD_WIDTH) + " ", tone or TONES[word]), why, width=LABEL_WIDTH)


def contributing(snapshot: NodeSnapshot) -> Line:
    status, swarm = snapshot.status, snapshot.status.swarm
    answer = health_of(snapshot).contributing
    tally = f"{count(swarm.groups_sent)} groups sent, {count(swarm.groups_confirmed)} confirmed"
    if snapshot.phase is NodePhase.STOPPED:
        return _answer("contributing", answer.word, f"not running; {tally}", tone=Tone.FAINT)
    if answer.word is AnswerWord.NO or snapshot.phase is NodePhase.STARTING:
        return _answer("contributing", answer.word, problem_text(answer))
    if status.generation.state == OFF and status.node.role != "exchange":
        return _answer("contributing", answer.word, f"{swarm.weights_bytes_out / 1e6:.1f} MB of weights sent")
    share = f" ({percent(swarm.groups_confirmed, swarm.groups_sent)})" if swarm.groups_confirmed else ""
    return _answer("contributing", answer.word, tally + share)


def learning(snapshot: NodeSnapshot) -> Line:
    """Return whether steps change the model, with the trend of the reward."""
    status = snapshot.status
    answer = health_of(snapshot).learning
    if answer.word is AnswerWord.NOT_APPLICABLE and status.node.role == "exchange":
        return _answer("learning", answer.word, printable(answer.why))
    if answer.word is AnswerWord.NOT_APPLICABLE:
        age_s = status.swarm.weights_age_s
        words = f"it follows a learner; version {status.generation.policy_version}"
        return _answer("learning", answer.word, words + ("" if age_s is None else f", {age_s:.0f} s old"))
    if snapshot.is_live and answer.word is not AnswerWord.YES:
        return _answer("learning", answer.word, printable(answer.why) if answer.is_well else problem_text(answer))
    rewards = [point.reward_mean for point in snapshot.history.steps if point.reward_mean is not None]
    step, tone = f"step {status.learner.step}", None if snapshot.is_live else Tone.FAINT
    if len(rewards) < MIN_STEPS:
        return _answer("learning", answer.word, f"{step}; the trend shows after {MIN_STEPS} steps", tone=tone)
    first, last, direction = trend(rewards)
    why = f"{step}, reward {direction} {first:.2f} -> {last:.2f}{_pass_words(snapshot)}"
    return _answer("learning", answer.word, why, tone=tone)


def _pass_words(snapshot: NodeSnapshot) -> str:
    """Return pass@1 of the task that was evaluated last, from its first to its last evaluation."""
    evaluations = snapshot.history.evaluations
    if not evaluations:
        return ""
    same = [point for point in evaluations if point.task == evaluations[-1].task]
    return f", pass@1 {same[0].pass_at_1:.2f} -> {same[-1].pass_at_1:.2f}"


def trend(values: Sequence[float]) -> tuple[float, float, str]:
    """Return the means of the first and of the last quarter, and `yes`, `flat` or `falling`.
    Two means differ if they are more than CLEAR_ERRORS standard errors apart.
    """
    quarter = max(2, len(values) // 4)
    head, tail = values[:quarter], values[-quarter:]
    first, last = statistics.fmean(head), statistics.fmean(tail)
    error = ((statistics.variance(head) + statistics.variance(tail)) / quarter) ** 0.5
    if abs(last - first) <= CLEAR_ERRORS * error:
        return first, last, "flat"
    return first, last, "up" if last > first else "down"


def healthy(snapshot: NodeSnapshot) -> Line:
    """Return the first problem with its remedy, and the number of further problems."""
    answer = health_of(snapshot).healthy
    if not snapshot.is_live:
        return _not_running(snapshot, answer)
    if answer.word is AnswerWord.NOT_YET:  # it is stopping
        return _answer("healthy", answer.word, problem_text(answer))
    if not (found := problems(snapshot)):
        swarm = snapshot.status.swarm
        return _answer("healthy", answer.word, f"{swarm.state}: {printable(swarm.reason)}")
    more = f" (and {len(found) - 1} more: `?`)" if len(found) > 1 else ""
    tone = Tone.WARN if answer.is_well else Tone.BAD
    return _answer("healthy", answer.word, found[0] + more, tone=tone)


def _not_running(snapshot: NodeSnapshot, answer: HealthAnswer) -> Line:
    if snapshot.phase is NodePhase.STARTING:
        why = f"the node starts; a large model takes a while; see {snapshot.logs}"
        return _answer("healthy", answer.word, why, tone=Tone.WARN)
    if snapshot.phase is NodePhase.SILENT:
        return _answer("healthy", AnswerWord.NO, f"it runs and does not answer: see {snapshot.logs}")
    if answer.is_well:
        why = f"{answer.why}, {ago(snapshot.reported_at, snapshot.taken_at)} ago"
        return _answer("healthy", answer.word, why, tone=Tone.GOOD)
    return _answer("healthy", answer.word, f"{answer.why}: see {snapshot.logs}")


def problems(snapshot: NodeSnapshot) -> list[str]:
    """Return the problems of a running node with their remedies, the worst first."""
    machine = snapshot.machine
    answer = health_of(snapshot).healthy
    found = [] if answer.is_well else [problem_text(answer)]
    if (stalled_s := _stalled_s(snapshot)) is not None:
        found.append(
            f"no step for {ago(snapshot.taken_at - stalled_s, snapshot.taken_at)}: are groups ready? press `g`"
        )
    if machine.ram_total_bytes and machine.ram_used_bytes > RAM_FULL * machine.ram_total_bytes:
        found.append("memory is nearly full: `ftis-node doctor` suggests settings that fit")
    return found


def _stalled_s(snapshot: NodeSnapshot) -> float | None:
    """Return the seconds since the last step if they far exceed the usual time of a step, else None."""
    times = [point.time for point in snapshot.history.steps[-MIN_STEPS:]]
    if len(times) < MIN_STEPS:
        return None
    usual_s = (times[-1] - times[0]) / (len(times) - 1)
    began_at = snapshot.taken_at - snapshot.status.node.uptime_s
    waited_s = snapshot.taken_at - max(times[-1], began_at)
    return waited_s if waited_s > max(STALL_AT_LEAST_S, STALL_FACTOR * usual_s) else None


def next_lines(snapshot: NodeSnapshot) -> tuple[Line, ...]:
    """Return the command that starts a stopped node again and the age of its values, or advice for a waiting node."""
    if snapshot.phase is not NodePhase.STOPPED:
        return _waiting(snapshot)
    told = f"status of {date_time(snapshot.reported_at)}" if snapshot.reported_at else "it left no status"
    tone = Tone.PLAIN if health_of(snapshot).healthy.is_well else Tone.WARN
    return (
        line(Span(f"{told}; start it again (? shows the whole command):", tone)),
        line("  ", Span(snapshot.start_command, Tone.STRONG)),
    )


def _waiting(snapshot: NodeSnapshot) -> tuple[Line, ...]:
    """Return advice and the expected time while an answer is "not yet"; nothing if no answer is."""
    health = health_of(snapshot)
    waits = [answer for answer in (health.learning, health.contributing) if answer.word is AnswerWord.NOT_YET]
    if not waits:
        return ()
    advice = printable(waits[0].advice or "wait")
    is_running = snapshot.phase is NodePhase.RUNNING and snapshot.status.node.state == "running"
    if is_running and waits[0] is health.learning:
        usual_s = _usual_step_s(snapshot)
        advice += "; its time is not known yet" if usual_s is None else f"; a step usually takes {duration(usual_s)}"
    return (labeled("what now?", Span(advice, Tone.WARN), width=LABEL_WIDTH),)


def _usual_step_s(snapshot: NodeSnapshot) -> float | None:
    """Return the median seconds between the last steps; None if the home has fewer than two."""
    times = [point.time for point in snapshot.history.steps[-MIN_STEPS:]]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return statistics.median(gaps) if gaps else None


def worst_tone(snapshot: NodeSnapshot) -> Tone:
    """Return the tone of the worst of the three answers."""
    tones = [TONES[answer.word] for answer in health_of(snapshot)]
    return next((tone for tone in (Tone.BAD, Tone.WARN, Tone.GOOD) if tone in tones), Tone.FAINT)
