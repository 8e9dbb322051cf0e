"""The three questions that one looks at the screen for: does it contribute, does it learn, is it healthy.

A "no" is that of `telemetry/health_summary.py`, which `status` and `/metrics` use too. The screen adds what a status
document lacks (the curves, the machine).
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from ftis_node.dashboard.snapshot import Phase
from ftis_node.dashboard.view.spans import Line, Span, Tone, ago, count, labelled, line, moment, percent, sanitized
from ftis_node.telemetry.health_summary import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.telemetry.health_summary import Answer, Verdict

LABEL_WIDTH, WORD_WIDTH = 14, 10
MIN_STEPS = 8  # before that, a trend is noise
MARKS = ("start", "stop", "failed")  # events that say whether a node runs
CLEAR_ERRORS = 2.0  # so many standard errors apart are two means called different
STALL_FACTOR, STALL_AT_LEAST_S = 10.0, 120.0
DISK_LOW_BYTES = 2e9
RAM_FULL = 0.95


def answer_lines(snapshot: NodeSnapshot) -> tuple[Line, Line, Line]:
    """Contributing, learning, healthy: a word each, and why."""
    return contributing(snapshot), learning(snapshot), healthy(snapshot)


def health_of(snapshot: NodeSnapshot) -> Verdict:
    """What everybody says of this status."""
    return judge(msgspec.to_builtins(snapshot.status), now=snapshot.taken_at)


def said(answer: Answer) -> str:
    """Why, and what to do about it; the text of peers in it is sanitized."""
    return sanitized(f"{answer.why}: {answer.advice}" if answer.advice else answer.why)


def _answer(question: str, word: str, tone: Tone, why: str) -> Line:
    return labelled(question, Span(word.ljust(WORD_WIDTH), tone), why, width=LABEL_WIDTH)


def contributing(snapshot: NodeSnapshot) -> Line:
    """Whether what it makes reaches others."""
    status, swarm = snapshot.status, snapshot.status.swarm
    sent, confirmed = swarm.groups_sent, swarm.groups_confirmed
    made = f"{count(status.generation.groups_made)} groups made"
    tally = f"{count(sent)} sent, {count(confirmed)} confirmed"
    if snapshot.phase is Phase.STARTING:
        return _answer("contributing", "not yet", Tone.FAINT, "the node is starting: models are being loaded")
    if not snapshot.is_live:
        return _answer("contributing", "no", Tone.FAINT, f"not running; {made}, {tally}")
    answer = health_of(snapshot).contributing
    if not answer.is_well:
        return _answer("contributing", "no", Tone.BAD, said(answer))
    if status.node.role == "learner":
        words = f"a learner makes no groups; {swarm.weights_bytes_out / 1e6:.1f} MB of weights sent"
        return _answer("contributing", "weights", Tone.PLAIN, words)
    if not confirmed:
        return _answer("contributing", "not yet", Tone.PLAIN, f"{made}, {tally}")
    return _answer("contributing", "yes", Tone.GOOD, f"{made}, {tally} ({percent(confirmed, sent)})")


def learning(snapshot: NodeSnapshot) -> Line:
    """Whether the reward rises, or the pass@1."""
    status = snapshot.status
    if status.node.role == "generator":
        age_s = status.swarm.weights_age_s
        words = f"it follows a learner; version {status.generation.policy_version}"
        return _answer("learning", "follows", Tone.PLAIN, words + ("" if age_s is None else f", {age_s:.0f} s old"))
    answer = health_of(snapshot).learning
    if snapshot.is_live and not answer.is_well:
        return _answer("learning", "no", Tone.BAD, said(answer))
    rewards = [point.reward_mean for point in snapshot.history.steps if point.reward_mean is not None]
    step = f"step {status.learner.step}"
    if len(rewards) < MIN_STEPS:
        return _answer("learning", "too early", Tone.PLAIN, f"{step}; {MIN_STEPS} steps tell something")
    first, last, word = trend(rewards)
    tone = {"yes": Tone.GOOD, "falling": Tone.BAD}.get(word, Tone.PLAIN)
    why = f"{step}, reward {first:.2f} -> {last:.2f}{_pass_words(snapshot)}"
    return _answer("learning", word, tone if snapshot.is_live else Tone.FAINT, why)


def _pass_words(snapshot: NodeSnapshot) -> str:
    """pass@1 of the task evaluated last, from its first to its last."""
    evaluations = snapshot.history.evaluations
    if not evaluations:
        return ""
    same = [point for point in evaluations if point.task == evaluations[-1].task]
    return f", pass@1 {same[0].pass_at_1:.2f} -> {same[-1].pass_at_1:.2f}"


def trend(values: Sequence[float]) -> tuple[float, float, str]:
    """Mean of the first quarter, of the last one, and `yes`, `flat` or `falling`: whether they differ clearly."""
    quarter = max(2, len(values) // 4)
    head, tail = values[:quarter], values[-quarter:]
    first, last = statistics.fmean(head), statistics.fmean(tail)
    error = ((statistics.variance(head) + statistics.variance(tail)) / quarter) ** 0.5
    if abs(last - first) <= CLEAR_ERRORS * error:
        return first, last, "flat"
    return first, last, "yes" if last > first else "falling"


def healthy(snapshot: NodeSnapshot) -> Line:
    """The first thing that is wrong, with what to do, and how many more there are."""
    if not snapshot.is_live:
        return _not_running(snapshot)
    found = problems(snapshot)
    if not found:
        swarm = snapshot.status.swarm
        return _answer("healthy", "yes", Tone.GOOD, f"{swarm.state}: {sanitized(swarm.reason)}")
    more = f" (and {len(found) - 1} more: `?`)" if len(found) > 1 else ""
    return _answer("healthy", "look", Tone.BAD, found[0] + more)


def _not_running(snapshot: NodeSnapshot) -> Line:
    if snapshot.phase is Phase.STARTING:
        return _answer("healthy", "starting", Tone.WARN, f"this takes a while for a large model; log: {snapshot.logs}")
    if snapshot.phase is Phase.SILENT:
        return _answer("healthy", "no", Tone.BAD, f"it runs and does not answer: look into {snapshot.logs}")
    if not snapshot.history.events:
        return _answer("healthy", "stopped", Tone.WARN, "the node does not run")
    if ended_cleanly(snapshot):
        return _answer(
            "healthy", "stopped", Tone.WARN, f"as it was asked to, {ago(snapshot.reported_at, snapshot.taken_at)} ago"
        )
    return _answer("healthy", "stopped", Tone.BAD, f"without a word (killed, or a fault): look into {snapshot.logs}")


def ended_cleanly(snapshot: NodeSnapshot) -> bool:
    """Whether the trail's last start has its stop, and no fault came before it."""
    marks = [event.get("event") for event in snapshot.history.events if event.get("event") in MARKS]
    return marks[-1:] == ["stop"] and marks[-2:] != ["failed", "stop"]


def problems(snapshot: NodeSnapshot) -> list[str]:
    """What keeps a running node from being healthy, the worst first; each says what to do."""
    status, machine = snapshot.status, snapshot.machine
    answer = health_of(snapshot).healthy
    found = [] if answer.is_well else [said(answer)]
    if (stalled_s := _stalled_s(snapshot)) is not None:
        found.append(f"no step for {ago(snapshot.taken_at - stalled_s, snapshot.taken_at)}: are groups ready? see `g`")
    if machine.disk_free_bytes and machine.disk_free_bytes < DISK_LOW_BYTES:
        found.append(f"{machine.disk_free_bytes / 1e9:.1f} GB of disk left: make room")
    if machine.ram_total_bytes and machine.ram_used_bytes > RAM_FULL * machine.ram_total_bytes:
        found.append("memory is nearly full: `ftis-node doctor` says what would make it fit")
    if status.learner.out_of_memory:
        found.append(f"the last step ran out of memory {status.learner.out_of_memory} times: lower micro_batch_tokens")
    return found


def _stalled_s(snapshot: NodeSnapshot) -> float | None:
    """For how long there was no step, where that is far longer than the steps before took."""
    times = [point.time for point in snapshot.history.steps[-MIN_STEPS:]]
    if len(times) < MIN_STEPS:
        return None
    usual_s = (times[-1] - times[0]) / (len(times) - 1)
    began_at = snapshot.taken_at - snapshot.status.node.uptime_s
    waited_s = snapshot.taken_at - max(times[-1], began_at)
    return waited_s if waited_s > max(STALL_AT_LEAST_S, STALL_FACTOR * usual_s) else None


def next_lines(snapshot: NodeSnapshot) -> tuple[Line, ...]:
    """What to do with a node that is stopped, and where its figures are from; none for one that runs."""
    if snapshot.phase is not Phase.STOPPED:
        return ()
    told = f"figures of {moment(snapshot.reported_at)}" if snapshot.reported_at else "it left no figures"
    return (
        line(Span(f"{told}; start it again (? shows the whole line):", Tone.WARN)),
        line("  ", Span(snapshot.start_command, Tone.STRONG)),
    )
