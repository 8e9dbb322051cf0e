"""What the log says about the swarm: changes of its state that matter to an operator, and refused groups.

Peers that join and leave have no line here: the directory loop logs them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftis_node.gossip import SwarmPhase, SwarmState
from ftis_node.gossip.multiaddr import is_public
from ftis_node.gossip.types import NO_PEERS_GIVEN, NOBODY_ANSWERS
from ftis_node.node.peers.node_part import NodePart
from ftis_node.swarm.reasons import advice_for, sentence
from ftis_node.swarm.refusals import RefusalLog, RefusedSender
from ftis_node.swarm.reputation import BY_OPERATOR
from ftis_node.telemetry.clock import NOTABLE_SKEW_S, REFUSED_SKEW_S
from ftis_node.telemetry.terminal_text import clipped

log = logging.getLogger(__name__)
REASON_WIDTH = 32
SYNCHRONISE = "switch on time synchronization (systemd-timesyncd, chrony)"
P2PDS_PREAMBLE = re.compile(r"failed to dial.*all dials failed \* \[[^]]*\] ")
UNPRINTABLE = re.compile(r"[^ -~]+")


class SwarmLogLines:
    """Generator of log lines that remembers the last logged state."""

    def __init__(self) -> None:
        self._last_logged: tuple[str, str] | None = None
        self._was_warned = False  # of a wrong clock
        self._advised: set[int] = set()  # levels of the advice that was logged

    def lines(
        self,
        state: SwarmState,
        *,
        clock_skew_s: float | None,
        addresses: Sequence[str],
        advice: str = "",
        release: str = "",
    ) -> Iterator[tuple[int, str]]:
        """Yield level and text of each log line for the present state.

        `clock_skew_s` is the peers' clocks minus this machine's, None before a peer was met. `advice` says what to do
        if most members have a newer wire version, `release` if they run a newer release. A wrong clock and both are
        logged once per start.
        """
        message = (str(state.state), _gist(state))
        if message != self._last_logged and state.state is not SwarmPhase.STARTING:
            self._last_logged = message
            yield _connection_line(state, addresses)
        if clock_skew_s is not None and abs(clock_skew_s) >= NOTABLE_SKEW_S and not self._was_warned:
            self._was_warned = True
            yield logging.WARNING, clock_words(clock_skew_s)
        for level, text in ((logging.WARNING, advice), (logging.INFO, release)):
            if text and level not in self._advised:
                self._advised.add(level)
                yield level, text


def clock_words(skew_s: float) -> str:
    """Return a sentence with the error of this machine's clock and a remedy."""
    which = "behind" if skew_s > 0 else "ahead of"
    so = "they refuse what we send" if abs(skew_s) >= REFUSED_SKEW_S else f"they refuse us at {REFUSED_SKEW_S:g} s"
    return f"this machine's clock is {abs(skew_s):.1f} s {which} the peers', {so}: {SYNCHRONISE}"


def _gist(state: SwarmState) -> str:
    """Return the reason without its numbers and without the clause about the next try; "" if connected."""
    return "" if state.state is SwarmPhase.CONNECTED else re.sub(r"\d+ peers?|\d+", "#", state.reason.split(",")[0])


def _connection_line(state: SwarmState, addresses: Sequence[str]) -> tuple[int, str]:
    reason = P2PDS_PREAMBLE.sub("", UNPRINTABLE.sub(" ", state.reason))
    if state.state is SwarmPhase.CONNECTED:
        return logging.INFO, f"in the swarm: {reason}"
    if state.reason.startswith(NO_PEERS_GIVEN):
        ranked = sorted(addresses, key=lambda address: (not is_public(address), "/127.0.0.1/" in address, address))
        how = f"others join it with --peers {ranked[0]}" if ranked else "it has no address yet that others could dial"
        return logging.INFO, f"working alone: {NO_PEERS_GIVEN}; {how}"
    if state.reason.startswith(NOBODY_ANSWERS):
        return logging.WARNING, f"working alone: {reason}; `ftis-node doctor --peers ADDRESS` looks closer"
    return logging.INFO, f"working alone so far: {reason}"


@dataclass(eq=False, repr=False)
class RefusalReporter(NodePart):
    """Reports refused groups: the senders that this node refuses, and the peers that refuse this node's.

    Each node's directory record names some of the senders that it refuses. So a sender learns it, even if it is banned.
    The log and the events have one entry for each sender or peer and reason, 12 an hour at most. The status and the
    dashboard show the present state.
    """

    def __post_init__(self) -> None:
        self.refused: Sequence[RefusedSender] = ()
        self.refusing: Sequence[RefusedSender] = ()
        self._log_refused, self._log_refusing = RefusalLog(), RefusalLog()

    async def update(self) -> None:
        """Read which groups are refused, and log what is new. The directory loop calls this once a second."""
        now, known = time.time(), await self.gossip.known_members()
        self.refused = self.peers.refused_senders()
        since = {peer.peer_id: peer.since for peer in self.refusing}
        self.refusing = [
            RefusedSender(peer_id, *claim, since.get(peer_id, now))
            for peer_id in known
            if (claim := self._claim_of(peer_id)) is not None
        ]
        begun, ended = self._log_refused.news(self.refused, now=now)
        for sender in begun:
            if sender.reason != BY_OPERATOR:  # who knows it
                self._report("peer_refused", sender, "the groups of %s are refused as %s")
        for peer_id in ended:
            log.info("the groups of %s are no longer refused", self.peers.registry.label(peer_id))
        begun, ended = self._log_refusing.news(self.refusing, now=now)
        for peer in begun:
            self._report("refused_by", peer, "%s refuses this node's groups as %s")
        for peer_id in ended:
            log.info("%s no longer refuses this node's groups", self.peers.registry.label(peer_id))

    def _report(self, event: str, one: RefusedSender, line: str) -> None:
        self.context.events.write(event, peer=one.peer_id, reason=one.reason, num_groups=one.num_groups)
        groups = "1 group" if one.num_groups == 1 else f"{one.num_groups} groups"
        why = f"{one.reason} ({sentence(one.reason)}; {groups}): {advice_for(one.reason)}"
        log.warning(line, self.peers.registry.label(one.peer_id), why)

    def _claim_of(self, peer_id: str) -> tuple[str, int] | None:
        """Return why a peer refuses this node's groups, and how many; None if its record does not say so."""
        record = self.peers.registry.record_of(peer_id)
        if record is None or record.stats is None:
            return None
        own = (one for one in record.stats.refused_senders if one[0] == self.context.peer_id)
        return next(((clipped(reason, REASON_WIDTH), num_groups) for _, reason, num_groups in own), None)
