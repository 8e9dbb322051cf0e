"""Health summary: does a node contribute, does it learn, is it healthy? Computed from its status.

`status`, the dashboard and `/metrics` show these answers. Each is one of `AnswerWord`. An answer other than yes gives
the cause and the remedy. Pure: no clock, no files.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.telemetry.terminal_text import date_time

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftis_node.telemetry.status import ReceiptFigures, RefusalStatus, Status, SwarmStatus

ID_TAIL = 8
OFF = "off"  # the state of a worker that the role does not need
READY = "ready"
PAUSED_ADVICE = "free disk space or raise limits.home_bytes; the node resumes by itself"
BUDGET_UNITS = {"generate_tokens": "tokens generated", "learn_steps": "steps", "learn_tokens": "tokens trained on"}
WORKERS = ("generation", "learner")
# Thresholds of the answers.
GROUP_S, STEP_S, SNAPSHOT_S = 900.0, 3600.0, 30.0
CLOCK_SKEW_S, DAY_S = 10.0, 86400.0
UNCONFIRMED_GROUPS = 32
JUDGED_GROUPS, REFUSED_SHARE = 32, 0.5  # with fewer groups the refused share is not meaningful
DISK_FREE_BYTES = 2e9
UNREWARDED_GROUPS = 50
NO_SIGNAL_SHARE = 0.9
CUT_SHARE = 0.5
START_KL, FROM_START_KL = 1.0, 3.0  # nats a token; the second grows faster (learner/train_report.py)


class AnswerWord(StrEnum):
    """The closed set of answers on all screens."""

    YES = "yes"
    NO = "no"
    NOT_YET = "not yet"  # no problem: it needs more time
    NOT_APPLICABLE = "not applicable"  # the node's role does not do it
    PAUSED = "paused"  # by a command or the schedule
    FINISHED = "finished"  # the node has used up its budget and ended
    STOPPED = "stopped"  # a user stopped the node


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """One answer. `why` is its cause as a clause; `advice` is what to do, "" if nothing. A yes may have advice."""

    word: AnswerWord
    why: str
    advice: str = ""

    @property
    def is_well(self) -> bool:
        """Return whether the operator need not act."""
        return self.word is not AnswerWord.NO


_yes, _no, _not_yet = (partial(HealthAnswer, word) for word in (AnswerWord.YES, AnswerWord.NO, AnswerWord.NOT_YET))


class HealthSummary(NamedTuple):
    contributing: HealthAnswer
    learning: HealthAnswer
    healthy: HealthAnswer

    def items(self) -> Iterable[tuple[str, HealthAnswer]]:
        return self._asdict().items()


def summarize_health(status: Status, *, now: float) -> HealthSummary:
    """Return the answers for a status; `now` is Unix time in seconds."""
    state = status.node.state
    if state not in ("running", "starting", "stopping"):
        answer = _ended(status)
        return HealthSummary(answer, answer, answer)
    healthy = _healthy(status, now)
    if state in ("starting", "stopping"):
        wait = _not_yet("the node is starting", "wait while models load; see logs/ in the home")
        if state == "stopping":
            waits_for = status.node.waits_for
            wait = _not_yet("the node is stopping", f"it waits for {waits_for}" if waits_for else "wait until it ends")
        return HealthSummary(wait, wait, wait if healthy.is_well else healthy)
    if (pause := status.pause).reason:
        why = pause_words(pause.reason, pause.until, now=now)
        ends_first = "; ".join(filter(None, ("the step in progress ends first", status.limits.paused)))
        advice = "ftis-node resume ends it" if pause.in_effect else ends_first
        paused = HealthAnswer(AnswerWord.PAUSED, why, advice)
        return HealthSummary(paused, paused, healthy)
    return HealthSummary(_contributing(status, now), _learning(status, now), healthy)


def pause_words(reason: str, until: float | None, *, now: float) -> str:
    """Return `paused until 07:00: outside schedule.hours 22-07`, with the date of a day that is not near."""
    if until is None:
        return f"paused: {reason}"
    end = time.strftime("%H:%M", time.localtime(until)) if until - now < DAY_S else date_time(until)
    return f"paused until {end}: {reason}"


def _ended(status: Status) -> HealthAnswer:
    """Return how a node that is not running ended, and the command that resumes it."""
    command = status.node.resume or "ftis-node join ..."
    match status.node.end:
        case "finished":
            used = ", ".join(
                f"{amount.limit:,} of {amount.limit:,} {unit}"
                for name, unit in BUDGET_UNITS.items()
                if (amount := getattr(status.budget, name)).left == 0
            )
            return HealthAnswer(AnswerWord.FINISHED, used or "all work is done", f"go on with {command}")
        case "stopped":
            return HealthAnswer(AnswerWord.STOPPED, "as asked", f"go on with {command}")
        case "failed":
            return _no("the node failed; see logs/ in the home", f"start it again with {command}")
        case _:
            return _no("the node did not end by itself: killed, or a fault", f"start it again with {command}")


def _contributing(status: Status, now: float) -> HealthAnswer:
    swarm, generation = status.swarm, status.generation
    if answer := _worker_away(status, "generation"):
        return answer
    if paused := status.limits.paused:
        return _no(f"paused: {paused}", PAUSED_ADVICE)
    if swarm.state != "connected":
        return _not_connected(swarm)
    if status.budget.generate_tokens.left == 0:
        return _yes("its token budget is used up; it still serves its groups")
    if status.node.role == "exchange":
        if not swarm.groups_sent:
            why = "no group of the trainer sent since the start"
            return _not_yet(why, "start the trainer (ftis-node docs train/trl)")
        return _sending(swarm)
    if generation.state == OFF:
        return _yes(f"{plural(swarm.peers_connected, 'peer')} may fetch its weights")
    silent_s = _silent_s(status, generation.last_group_at, now)
    if silent_s > GROUP_S and not status.replay.ready:
        return _no(f"no group generated for {duration(silent_s)}", "see logs/generation.log in the home")
    if not swarm.groups_sent:
        return _not_yet("no group sent since the start", "wait for the first")
    return _sending(swarm)


def _silent_s(status: Status, last_at: float | None, now: float) -> float:
    """Return the seconds since the last event, the start or the end of the last pause, whichever was the latest."""
    silent_s = status.node.uptime_s if last_at is None else now - last_at
    resumed_at = status.pause.resumed_at
    return silent_s if resumed_at is None else min(silent_s, now - resumed_at)


def refusal_facts(status: RefusalStatus, *, now: float) -> str:
    """Return the peer, the reason, the number of groups and the time of a refusal, as a clause with any characters."""
    who = f"{status.name} (..{status.peer_id[-ID_TAIL:]})" if status.name else f"..{status.peer_id[-ID_TAIL:]}"
    return f"{who}: {status.reason}, {plural(status.groups, 'group')} in {duration(now - status.since)}"


def _sending(swarm: SwarmStatus) -> HealthAnswer:
    sent, confirmed, num_refusing = swarm.groups_sent, swarm.groups_confirmed, len(swarm.refused_by)
    if 2 * num_refusing > swarm.peers_connected:
        first = swarm.refused_by[0]
        of = f"{num_refusing} of {plural(max(num_refusing, swarm.peers_connected), 'peer')}"
        return _no(f"{of} refuse its groups, as {first.reason}", first.advice)
    if confirmed:
        return _yes(f"{sent:,} groups sent, {confirmed:,} confirmed ({100 * confirmed / sent:.0f} %)")
    why = f"{plural(sent, 'group')} sent, none confirmed by a peer"
    if sent < UNCONFIRMED_GROUPS:
        return _not_yet(why, "wait for the first confirmation")
    return _no(why, "compare versions and clocks with peers: ftis-node doctor --peers ADDRESS")


def _not_connected(swarm: SwarmStatus) -> HealthAnswer:
    if swarm.state == "starting":
        return _not_yet(swarm.reason or "the network is starting", "wait")
    if "no peers" in swarm.reason:
        return _no(swarm.reason, "give --peers ADDRESS to meet others")
    return _no(swarm.reason, "check addresses and network: ftis-node doctor --peers ADDRESS")


def _learning(status: Status, now: float) -> HealthAnswer:
    learner, replay = status.learner, status.replay
    if status.node.role == "exchange":
        return HealthAnswer(AnswerWord.NOT_APPLICABLE, "the trainer beside this node trains the model")
    if learner.state == OFF:
        return HealthAnswer(AnswerWord.NOT_APPLICABLE, "the learner that this node follows trains the model")
    if answer := _worker_away(status, "learner"):
        return answer
    waited_s = _silent_s(status, learner.last_step_at, now)
    if waited_s > STEP_S:
        why = f"no step for {duration(waited_s)}, {plural(replay.ready, 'group')} ready"
        return _no(why, "check that groups arrive; see logs/learner.log in the home")
    if (num_groups := status.generation.groups_without_reward) >= UNREWARDED_GROUPS:
        learns = _yes if learner.grad_norm else _no  # it may learn from the groups of peers
        sample = f"; one completion: {status.generation.sample!r}" if status.generation.sample else ""
        advice = f"use an easier task, a larger model or another prompt format{sample}"
        return learns(f"no reward in {num_groups:,} groups", advice)
    if learner.last_step_at is None:
        ready = plural(replay.ready, "group")
        return _not_yet(f"no step since the start, {ready} ready", "wait for the first step")
    reward = "" if learner.reward_mean is None else f", reward {learner.reward_mean:.3f}"
    return _no_progress(status) or _side_effect(status) or _yes(f"step {learner.step}{reward}")


def _no_progress(status: Status) -> HealthAnswer | None:
    """Return why the last step had no signal; None if it had."""
    learner = status.learner
    if learner.kept_fraction == 0:
        why = "the last step used no completion: the filter dropped all"
        return _no(why, "rewards are equal or peers' models too different: see method.kl_threshold")
    if learner.reward_mean == 0:
        return _no("every reward of the last step was 0", "use an easier task or a larger model")
    if learner.grad_norm == 0:
        return _no("the last gradient was 0", "the rewards in each group were equal: check the task's difficulty")
    return None


def _side_effect(status: Status) -> HealthAnswer | None:
    """Return a yes with advice if training changes the model in a way that the operator should know."""
    learner, limit = status.learner, status.generation.max_completion_tokens
    if (share := learner.no_signal_fraction or 0.0) > NO_SIGNAL_SHARE:
        why = f"{100 * share:.0f} % of the node's groups have no signal: their rewards are equal"
        is_easy = (learner.reward_mean or 0.0) > 0.5
        return _yes(why, "use a harder task" if is_easy else "use an easier task, or a larger sampling.group_size")
    if (share := learner.cut_fraction or 0.0) > CUT_SHARE:
        why = f"{100 * share:.0f} % of the answers are cut" + (f" at {limit:,} tokens" if limit else "")
        return _yes(why, "raise sampling.max_completion_tokens, or set sampling.mask_truncated, in a new run")
    for drift, most in ((learner.kl_to_start, START_KL), (learner.kl_from_start, FROM_START_KL)):
        if drift is not None and drift > most:
            why = f"the model is {drift:.2f} nats a token from its start"
            return _yes(why, "if answers get worse: a lower learning rate or optimizer.kl_coef, in a new run")
    return None


def _healthy(status: Status, now: float) -> HealthAnswer:
    swarm, health = status.swarm, status.health
    if problems := health.problems:
        return _no(problems[0], "see logs/ in the home; ftis-node doctor checks the machine")
    if paused := status.limits.paused:
        return _no(f"paused: {paused}", PAUSED_ADVICE)
    if health.failing:
        return _no(health.failing[0], "see logs/ in the home; the node tries again")
    for name in WORKERS:
        state = getattr(status, name).state
        if state == "failed":
            return _no(f"the {name} worker failed for good", f"see logs/{name}.log in the home")
        if state == "backing-off":
            return _no(f"the {name} worker died and restarts", f"see logs/{name}.log in the home")
    taken_at = health.taken_at
    if taken_at and now - taken_at > SNAPSHOT_S:
        return _no(f"the last status is {duration(now - taken_at)} old", "the node hangs: restart it")
    skew_s = swarm.clock_skew_s
    if skew_s is not None and abs(skew_s) > CLOCK_SKEW_S:
        return _no(f"peers' clocks are {skew_s:+.0f} s off ours", "switch on time synchronization")
    free_bytes = status.limits.disk_free_bytes
    if free_bytes is not None and free_bytes < DISK_FREE_BYTES:
        return _no(f"{free_bytes / 1e9:.1f} GB of disk left", "free disk space")
    if times := status.learner.out_of_memory:
        why = f"the last step ran out of memory {plural(times, 'time')}"
        return _no(why, "lower learner.micro_batch_tokens")
    if update := swarm.update:  # this node cannot read the messages of newer peers
        return _no(*update.rsplit(": ", 1))
    refused = sum(swarm.groups_refused.values())
    judged = refused + swarm.groups_received
    if judged >= JUDGED_GROUPS and refused > REFUSED_SHARE * judged:
        reason = max(swarm.groups_refused, key=lambda name: swarm.groups_refused[name])
        why = f"{refused} of {judged} groups refused, most as {reason!r}"
        return _no(why, "ftis-node peers shows whose; ftis-node docs reference/refusals says why")
    if status.node.role == "exchange":
        return _yes("its loops are up")
    if status.pause.reason:
        return _yes("it serves its peers")
    has_both = OFF not in (status.generation.state, status.learner.state)
    return _yes("both workers are up" if has_both else "its worker is up")


def _worker_away(status: Status, name: str) -> HealthAnswer | None:
    """Return the answer if a worker accepts no calls; None if it accepts them or the role needs no worker."""
    state = getattr(status, name).state
    if state in (READY, OFF):
        return None
    where = f"see logs/{name}.log in the home"
    if state in ("starting", "paused"):  # at the end of a pause one worker starts after the other
        return _not_yet(f"the {name} worker is starting", f"wait while it loads; {where}")
    return _no(f"the {name} worker is {state}", where)


def used_by_peers(used: ReceiptFigures) -> str:
    """Return a sentence about the groups of this node on which peers say that they trained."""
    peers, groups = plural(used.recent_peers, "peer"), f"{used.recent_groups:,}"
    recent = f"{peers} trained on {groups} of this node's groups since yesterday"
    return f"{recent}, {plural(used.peers, 'peer')} on {used.groups:,} in all"


def plural(number: int, what: str) -> str:
    """Return `1 step`, `1,200 steps`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: `2 h 5 min`, `40 s`."""
    days, rest = divmod(int(max(0.0, seconds)), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number or len(parts) == 1)
