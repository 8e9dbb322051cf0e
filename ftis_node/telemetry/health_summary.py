"""Is the node contributing, is it learning, is it healthy? A status document in, three answers in words out.

Pure: `status`, the dashboard and `/metrics` ask the same judge, so they cannot disagree. An answer that is not yes says
why, and what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Document = Mapping[str, Any]

OFF = "off"  # the state of a worker that the role does without
READY = "ready"
PAUSED_ADVICE = "make room, or allow more with limits.home_bytes; it goes on by itself"
WORKERS = (("generation", "generation"), ("learner", "learner"))


class Word(StrEnum):
    """The short answer."""

    YES = "yes"
    NO = "no"
    NOT_YET = "not yet"  # nothing is wrong: it takes a while
    ELSEWHERE = "elsewhere"  # another node does it, for this role does not


@dataclass(frozen=True, slots=True)
class Answer:
    """`why` is a clause for people; `advice` says what to do, "" where nothing is."""

    word: Word
    why: str
    advice: str = ""

    @property
    def is_well(self) -> bool:
        """Whether nobody need look."""
        return self.word is not Word.NO


@dataclass(frozen=True, slots=True)
class Verdict:
    """The three answers."""

    contributing: Answer
    learning: Answer
    healthy: Answer

    def items(self) -> tuple[tuple[str, Answer], ...]:
        """The questions with their answers, in the order in which they are told."""
        return (("contributing", self.contributing), ("learning", self.learning), ("healthy", self.healthy))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take, and how much may go wrong, before a person should look."""

    group_s: float = 900.0
    step_s: float = 3600.0
    snapshot_s: float = 30.0
    clock_skew_s: float = 10.0
    unconfirmed_groups: int = 32
    judged_groups: int = 32  # so many of peers say something about the share that is refused
    refused_share: float = 0.5


def judge(document: Document, *, now: float, patience: Patience | None = None) -> Verdict:
    """The verdict on a status document (`status --json`); `now` is Unix time in seconds."""
    patience = patience or Patience()
    state = document["node"]["state"]
    if state not in ("running", "starting"):
        why = "the node is not running"
        return Verdict(
            Answer(Word.NO, why, "start it as before: ftis-node join ..."),
            Answer(Word.NO, why),
            Answer(Word.NO, "it failed; these are its last figures" if state == "failed" else why),
        )
    healthy = _healthy(document, now, patience)
    if state == "starting":
        wait = Answer(Word.NOT_YET, "the node is starting", "wait while models load; logs/ in the home tell more")
        return Verdict(wait, wait, healthy)
    return Verdict(_contributing(document, now, patience), _learning(document, now, patience), healthy)


def _contributing(document: Document, now: float, patience: Patience) -> Answer:
    swarm, generation = document["swarm"], document["generation"]
    if answer := _worker_away(document, "generation"):
        return answer
    if paused := document.get("limits", {}).get("paused"):
        return Answer(Word.NO, f"paused: {paused}", PAUSED_ADVICE)
    if swarm["state"] != "connected":
        return _not_connected(swarm)
    if document.get("budget", {}).get("generate_tokens", {}).get("left") == 0:
        return Answer(Word.YES, "all the tokens of its budget are generated; it still serves them")
    if generation["state"] == OFF:
        return Answer(Word.YES, f"{_count(swarm['peers_connected'], 'peer')} may take its weights")
    last, silent_s = generation.get("last_group_at"), document["node"]["uptime_s"]
    if last is not None:
        silent_s = now - last
    if silent_s > patience.group_s and not document["replay"]["ready"]:
        advice = "look into logs/generation.log in the home"
        return Answer(Word.NO, f"no group was made for {duration(silent_s)}", advice)
    if not swarm["groups_sent"]:
        return Answer(Word.NOT_YET, "no group was sent since the start", "wait for the first")
    if not swarm["groups_confirmed"] and swarm["groups_sent"] >= patience.unconfirmed_groups:
        why = f"{swarm['groups_sent']} groups were sent and no peer confirmed one"
        return Answer(Word.NO, why, "peers may refuse them: compare versions and clocks, see ftis-node doctor --peers")
    return Answer(Word.YES, f"{swarm['groups_sent']} groups sent, {swarm['groups_confirmed']} confirmed")


def _not_connected(swarm: Mapping[str, Any]) -> Answer:
    """Why nobody gets anything, and what helps."""
    if swarm["state"] == "starting":
        return Answer(Word.NOT_YET, swarm["reason"] or "the network is starting", "wait")
    if "no peers were given" in swarm["reason"]:
        return Answer(Word.NO, swarm["reason"], "give --peers ADDRESS to meet others")
    return Answer(Word.NO, swarm["reason"], "check addresses and network: ftis-node doctor --peers ADDRESS")


def _learning(document: Document, now: float, patience: Patience) -> Answer:
    learner, replay = document["learner"], document["replay"]
    if learner["state"] == OFF:
        return Answer(Word.ELSEWHERE, "the learner that it follows learns")
    if answer := _worker_away(document, "learner"):
        return answer
    last = learner.get("last_step_at")
    waited_s = document["node"]["uptime_s"] if last is None else now - last
    if waited_s > patience.step_s:
        why = f"no step for {duration(waited_s)}, {_count(replay['ready'], 'group')} ready"
        return Answer(Word.NO, why, "too few groups come in, or logs/learner.log in the home tells more")
    if last is None:
        ready = _count(replay["ready"], "group")
        return Answer(Word.NOT_YET, f"no step since the start, {ready} ready", "wait for the first step")
    if learner["kept_fraction"] == 0:
        why = "the last step used no completion: the filter dropped all"
        return Answer(Word.NO, why, "rewards are all alike, or peers' models too unlike: see method.kl_threshold")
    if learner["reward_mean"] == 0:
        return Answer(Word.NO, "every reward of the last step was 0", "an easier task, or a larger model, would teach")
    if learner["grad_norm"] == 0:
        return Answer(Word.NO, "the last gradient was 0", "every group's rewards were alike: see the task's difficulty")
    reward = "" if learner["reward_mean"] is None else f", reward {learner['reward_mean']:.3f}"
    return Answer(Word.YES, f"step {learner['step']}{reward}")


def _healthy(document: Document, now: float, patience: Patience) -> Answer:
    """The first thing that is wrong."""
    swarm, health = document["swarm"], document.get("health", {})
    if problems := health.get("problems"):
        return Answer(Word.NO, problems[0], "look into logs/ in the home; ftis-node doctor checks the machine")
    if paused := document.get("limits", {}).get("paused"):
        return Answer(Word.NO, f"paused: {paused}", PAUSED_ADVICE)
    for section, name in WORKERS:
        if document[section]["state"] == "failed":
            return Answer(Word.NO, f"the {name} worker was given up", f"look into logs/{name}.log in the home")
        if document[section]["state"] == "backing-off":
            return Answer(Word.NO, f"the {name} worker died and starts again", f"look into logs/{name}.log in the home")
    taken_at = health.get("taken_at")
    if taken_at and now - taken_at > patience.snapshot_s:
        return Answer(Word.NO, f"its figures are {duration(now - taken_at)} old", "the node hangs: stop and start it")
    skew_s = swarm["clock_skew_s"]
    if skew_s is not None and abs(skew_s) > patience.clock_skew_s:
        return Answer(Word.NO, f"peers' clocks are {skew_s:+.0f} s off ours", "switch on time synchronisation")
    if update := swarm.get("update"):  # what the swarm says is lost on this node
        return Answer(Word.NO, *update.rsplit(": ", 1))
    refused = sum(swarm["groups_refused"].values())
    judged = refused + swarm["groups_received"]
    if judged >= patience.judged_groups and refused > patience.refused_share * judged:
        reason = max(swarm["groups_refused"], key=swarm["groups_refused"].get)
        why = f"{refused} of {judged} groups were refused, most for {reason!r}"
        return Answer(Word.NO, why, "ftis-node peers shows whose; docs/reference/rejections.md says why")
    return Answer(Word.YES, "both workers are up" if _has_both(document) else "its worker is up")


def _worker_away(document: Document, name: str) -> Answer | None:
    """What to say of a worker that takes no calls now."""
    state = document[name]["state"]
    if state in (READY, OFF):
        return None
    where = f"logs/{name}.log in the home tells more"
    if state == "starting":
        return Answer(Word.NOT_YET, f"the {name} worker is starting", f"wait while it loads; {where}")
    return Answer(Word.NO, f"the {name} worker is {state}", where)


def _has_both(document: Document) -> bool:
    return OFF not in (document["generation"]["state"], document["learner"]["state"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def duration(seconds: float) -> str:
    """A length of time for people, in its two largest units: `2 h 5 min`, `40 s`."""
    days, rest = divmod(int(max(0.0, seconds)), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number or len(parts) == 1)
