"""Report of refused groups: the senders that this node refuses, and the peers that refuse this node's groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.node.peers.node_part import NodePart
from ftis_node.swarm.reasons import advice_for, sentence
from ftis_node.swarm.refusals import RefusalLog, RefusedSender
from ftis_node.swarm.reputation import BY_OPERATOR
from ftis_node.telemetry.terminal_text import clipped

log = logging.getLogger(__name__)
REASON_WIDTH = 32


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
