"""Which senders a step waits for: those whose groups come. It reads no clock; times are seconds, monotonic.

    rate       Senders get the whole wait if together they send at least a quarter of the quota during the step's
               own work. Slower senders share 6 % of the time.
    silence    A sender has a budget, which its next usable group renews: 1.5 times the longest of its recent gaps
               between groups, at least 1 and at most 4 waits.
    trial      A member without any usable group has a budget of one wait. All such members share 2 % of the time.

docs/get-started/concepts.md says why. A group is usable if it was accepted and its rewards differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ftis_node.swarm.lru import LruDict

MAX_SENDERS = 4096
GAPS, MAX_WAITS = 1.5, 4.0
RECENT_WAITS = 10.0  # half-life of a gap and of a rate
FULL_WAIT_SHARE = 0.25  # of the quota during the step's own work: slower senders do not get the whole wait
SLOW_SHARE = 0.06  # of the time, for senders below that rate
TRIAL_SHARE = 0.02  # of the time, for members that have sent nothing usable
LEAST_WAIT = 0.1  # of the longest wait: a shorter wait finds nothing


@dataclass(slots=True)
class SenderArrivals:
    """Arrivals of one sender. `waited_s` is the wait for it since its last usable group."""

    waited_s: float = 0.0
    first_at: float = 0.0
    last_at: float | None = None  # None: no usable group yet
    gap_s: float = 0.0  # the longest recent one
    gap_at: float = 0.0
    recent: float = 0.0  # groups after the first, each of which halves within `RECENT_WAITS`


class Allowance:
    """A share of the time, of which at most `cap_s` are saved. Once it is used up, it opens again at `least_s`."""

    def __init__(self, share: float, *, cap_s: float, least_s: float, now: float) -> None:
        self._share, self._cap_s, self._least_s = share, cap_s, least_s
        self._left_s, self._at = 0.0, now
        self._is_open = False

    def is_open(self, now: float) -> bool:
        self._left_s = min(self._left_s + self._share * (now - self._at), self._cap_s)
        self._at = now
        self._is_open = self._left_s > (0.0 if self._is_open else self._least_s)
        return self._is_open

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds


class AwaitedSenders:
    """Table of the arrivals by sender, and the decision whom to wait for. It drops the least recently used sender."""

    def __init__(self, *, longest_wait_s: float, now: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._half_life_s = RECENT_WAITS * longest_wait_s
        self._senders = LruDict[str, SenderArrivals](MAX_SENDERS)
        cap_s, least_s = longest_wait_s, LEAST_WAIT * longest_wait_s
        self._trial = Allowance(TRIAL_SHARE, cap_s=cap_s, least_s=least_s, now=now)
        self._slow = Allowance(SLOW_SHARE, cap_s=cap_s, least_s=least_s, now=now)
        self._are_slow = False  # the senders of the last answer

    def arrived(self, sender: str, *, now: float) -> None:
        """Note a usable group of a sender."""
        record = self._senders.touched(sender, SenderArrivals)
        if record.last_at is None:
            record.first_at = now
        else:
            gap_s = now - record.last_at
            if gap_s >= record.gap_s * self._decay(now - record.gap_at):
                record.gap_s, record.gap_at = gap_s, now
            record.recent = record.recent * self._decay(gap_s) + 1
        record.last_at, record.waited_s = now, 0.0

    def awaited(
        self,
        members: Iterable[str],
        *,
        now: float,
        work_s: float,
        quota: int,
        may_send: Callable[[str], bool] = lambda sender: True,
    ) -> list[str]:
        """Return the senders to wait for: those of earlier groups, and of `members` those without a group.

        `work_s` is the time of a step's own work without a wait, infinite if the node has nothing else to do. `quota`
        is the number of foreign groups of a step.
        """
        proven = [sender for sender, record in self._senders.items() if self._is_awaited(record, now)]
        proven = [sender for sender in proven if may_send(sender)]
        rate = sum(self._rate_of(self._senders[sender], now) for sender in proven)
        has_time, may_wait = work_s == math.inf, self._slow.is_open(now)
        self._are_slow = not has_time and rate * work_s < FULL_WAIT_SHARE * quota
        if self._are_slow and not may_wait:
            proven = []
        if not self._trial.is_open(now) and not has_time:
            return proven
        return proven + [peer for peer in members if self._is_on_trial(peer) and may_send(peer)]

    def waited(self, senders: Collection[str], seconds: float) -> None:
        """Charge a wait to the senders for which a step waited."""
        is_proven = [self._senders.touched(sender, SenderArrivals).last_at is not None for sender in senders]
        if senders and not any(is_proven):
            self._trial.spend(seconds)
        elif senders and self._are_slow:
            self._slow.spend(seconds)
        for sender in senders:
            self._senders.touched(sender, SenderArrivals).waited_s += seconds

    def _is_awaited(self, record: SenderArrivals, now: float) -> bool:
        gap_s = record.gap_s * self._decay(now - record.gap_at)  # the groups of a sender often come in bursts
        budget_s = min(max(GAPS * gap_s, self._longest_wait_s), MAX_WAITS * self._longest_wait_s)
        return record.last_at is not None and record.waited_s < budget_s

    def _is_on_trial(self, peer: str) -> bool:
        record = self._senders.get(peer)
        return record is None or (record.last_at is None and record.waited_s < self._longest_wait_s)

    def _rate_of(self, record: SenderArrivals, now: float) -> float:
        if record.last_at is None or not self._half_life_s:
            return 0.0
        recent = record.recent * self._decay(now - record.last_at)
        time_s = (1 - self._decay(now - record.first_at)) * self._half_life_s / math.log(2)
        return recent / time_s if time_s else 0.0

    def _decay(self, seconds: float) -> float:
        return 0.5 ** (seconds / self._half_life_s) if self._half_life_s else 0.0
