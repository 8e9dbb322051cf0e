"""Receipts: how much of a node's work its peers have trained on, by their own signed statements.

Each directory record has receipts (`records/peer_messages.py`). For each sender they count the groups on which the
signer has trained since its home exists, and their tokens. Groups without a signal and copies do not count. The counts
must be possible for the signer (`refusal_of`), and a node counts no more groups than it has published. Two nodes of one
operator can still praise each other, so nothing but a rank depends on receipts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple, TypeVar

from ftis_node.config.manifest import RunManifest
from ftis_node.records.bounds import MAX_INTEGER, MAX_RECEIPTS
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.peer_messages import Receipt, receipt_key
from ftis_node.swarm.lru import LruDict
from ftis_node.telemetry.status import ReceiptFigures

MAX_SENDERS = 4096  # whose groups this node has used
MAX_SIGNERS = 1024  # that have used groups of this node
DAY_S = 86_400
MOST_OF_MEDIAN = 20  # how much one signer counts in a rank; cards differ that much in speed
TURN_STEP = 7  # a prime, so that the beginnings of records reach all items
T = TypeVar("T")
OF_ITSELF, INFLATED = "receipt_of_itself", "receipt_inflated"


class StepLimits(NamedTuple):
    """What one step can use by the run's settings: groups, and tokens of each group. 0: unknown."""

    groups: int = 0
    tokens: int = 0


NO_LIMITS = StepLimits()


def step_limits(manifest: RunManifest) -> StepLimits:
    """Return the limits of any node of a run, whatever its role."""
    step, sampling = manifest.step, manifest.sampling
    return StepLimits(step.own_groups + step.foreign_groups, sampling.group_size * sampling.max_total_tokens)


class Used(NamedTuple):
    groups: int = 0
    tokens: int = 0

    def with_group(self, num_tokens: int) -> Used:
        return Used(min(self.groups + 1, MAX_INTEGER), min(self.tokens + num_tokens, MAX_INTEGER))


def refusal_of(peer_id: str, step: int, receipts: Sequence[Receipt], limits: StepLimits) -> str:
    """Return the reason to count none of a signer's receipts; "" if they can be true.

    `step` is the number of steps that the signer says it has done.
    """
    if any(receipt.key == receipt_key(peer_id) for receipt in receipts):
        return OF_ITSELF
    groups = sum(receipt.groups for receipt in receipts)
    if limits.groups and groups > step * limits.groups:
        return INFLATED
    if limits.tokens and any(receipt.tokens > receipt.groups * limits.tokens for receipt in receipts):
        return INFLATED
    return ""


@dataclass(slots=True)
class Signer:
    """A peer that has trained on this node's groups: the counts at the end of each day."""

    days: dict[int, Used]  # by days since 1970 (UTC), the newest three

    @property
    def used(self) -> Used:
        """The largest counts. The clock may have been ahead, so they need not be of the last day."""
        return max(self.days.values())

    def before(self, day: int) -> Used:
        earlier = [one for one in self.days if one < day]
        return self.days[max(earlier)] if earlier else Used()


@dataclass(eq=False)
class ReceiptBook:
    """What this node has used of each sender (`given`), and what signers say that they used of it (`signers`).

    The row of this node itself in `given` counts the groups that it has published.
    """

    own_id: str
    limits: StepLimits = NO_LIMITS
    given: LruDict[str, Used] = field(default_factory=lambda: LruDict(MAX_SENDERS))
    signers: LruDict[str, Signer] = field(default_factory=lambda: LruDict(MAX_SIGNERS))
    forgotten: set[str] = field(default_factory=set)  # signers to delete; the owner clears both sets
    changed: set[str] = field(default_factory=set)  # rows of both tables to save

    def note_used(self, sender: str, num_tokens: int) -> None:
        """Add a group of a sender on which this node has trained, or an own one that it has published."""
        self.given[sender] = self.given.get(sender, Used()).with_group(num_tokens)
        self.changed.add(sender)

    def receipts(self, turn: int) -> tuple[Receipt, ...]:
        """Return the receipts for this node's record: all, or as many as a record holds, others in each turn."""
        senders = sorted(sender for sender in self.given if sender != self.own_id)
        chosen = in_turn(senders, turn, most=MAX_RECEIPTS)
        return tuple(Receipt(receipt_key(sender), *self.given[sender]) for sender in chosen)

    def least_steps(self) -> int:
        """Return the number of steps that this node has done at least, by its receipts.

        The learner's step may be lower: of another role, or of a learner that began again.
        """
        groups = sum(used.groups for sender, used in self.given.items() if sender != self.own_id)
        return -(-groups // self.limits.groups) if self.limits.groups else 0

    def note_record(self, record: PeerRecord, *, now: float) -> str:
        """Count the receipt for this node in a peer's signed record. Return why it is refused.

        An old record, such as one that a third peer sends again, has smaller counts and changes nothing.
        """
        if record.stats is None or record.peer_id == self.own_id:
            return ""
        mine = [one for one in record.stats.receipts if one.key == receipt_key(self.own_id)]
        if not mine:
            return ""
        if reason := refusal_of(record.peer_id, record.stats.step, record.stats.receipts, self.limits):
            return reason
        signer, used = self.signers.get(record.peer_id), Used(mine[0].groups, mine[0].tokens)
        if signer is not None and (used.groups < signer.used.groups or used.tokens <= signer.used.tokens):
            return ""
        today = int(now // DAY_S)
        days = {} if signer is None else {day: one for day, one in signer.days.items() if day <= today}
        days[today] = used
        newest = sorted(days)[-3:]
        if signer is None and len(self.signers) >= MAX_SIGNERS:
            least = min(self.signers, key=lambda peer_id: self.signers[peer_id].used)
            del self.signers[least]
            self.forgotten.add(least)
        self.signers[record.peer_id] = Signer({day: days[day] for day in newest})
        self.changed.add(record.peer_id)
        self.forgotten.discard(record.peer_id)
        return ""

    def figures(self, *, now: float) -> ReceiptFigures:
        """Return the sums over all signers, of each at most the groups that this node has published."""
        made = self.given.get(self.own_id, Used())
        yesterday, total, recent = int(now // DAY_S) - 1, Used(), []
        for signer in dict(self.signers).values():
            used, before = signer.used, signer.before(yesterday)
            total = Used(total.groups + min(used.groups, made.groups), total.tokens + min(used.tokens, made.tokens))
            recent.append(max(0, min(used.groups - before.groups, made.groups)))
        return ReceiptFigures(
            peers=len(self.signers),
            groups=total.groups,
            tokens=total.tokens,
            recent_peers=sum(groups > 0 for groups in recent),
            recent_groups=sum(recent),
        )


def in_turn(items: Sequence[T], turn: int, *, most: int) -> list[T]:
    """Return at most `most` of the items, beginning further on in each turn, so that all get their turn.

    A step is smaller than `most`, because a record may have space for fewer.
    """
    first = turn * TURN_STEP % max(1, len(items))
    return [*items[first:], *items[:first]][:most]


def totals_by_key(signed: Iterable[tuple[str, int, Sequence[Receipt]]], limits: StepLimits) -> dict[bytes, Used]:
    """Return what all signers together say that they used, by the sender's `receipt_key`.

    `signed` has each signer's peer id, steps and receipts. Receipts that cannot be true count nothing. A signer's steps
    are its claim, so its receipts together count at most `MOST_OF_MEDIAN` times those of the median signer.
    """
    counted = [list(_counted(peer_id, step, receipts, limits)) for peer_id, step, receipts in signed]
    sums = [sum(receipt.groups for receipt in receipts) for receipts in counted]
    most = MOST_OF_MEDIAN * median_low([total for total in sums if total] or [0])
    totals: dict[bytes, Used] = {}
    for receipts, total in zip(counted, sums, strict=True):
        share = min(1.0, most / total) if total else 0.0
        for receipt in receipts:
            before = totals.get(receipt.key, Used())
            groups, tokens = (int(share * value) if share < 1 else value for value in (receipt.groups, receipt.tokens))
            totals[receipt.key] = Used(before.groups + groups, before.tokens + tokens)
    return totals


def _counted(peer_id: str, step: int, receipts: Sequence[Receipt], limits: StepLimits) -> Iterator[Receipt]:
    if not refusal_of(peer_id, step, receipts, limits):
        yield from {receipt.key: receipt for receipt in receipts}.values()  # one for each sender
