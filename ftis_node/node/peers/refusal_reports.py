"""Reports of refused groups, in both directions: senders that this node refuses, and peers that refuse this node's.

Each node's directory record names some of the senders that it refuses. So a sender learns it, even if it is banned. The
log has one line for each sender or peer and reason; the status and the dashboard show the present state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftis_node.node.peers.node_part import NodePart
from ftis_node.swarm.reasons import advice_for, sentence
from ftis_node.swarm.refusals import RefusalLog, RefusedSender, RefusingPeers
from ftis_node.swarm.reputation import BY_OPERATOR
from ftis_node.telemetry.status import RefusalStatus
from ftis_node.telemetry.terminal_text import clipped

log = logging.getLogger(__name__)
MAX_SHOWN = 12  # in the status
REASON_WIDTH = 32


@dataclass(eq=False, repr=False)
class RefusalReporter(NodePart):
    """Reporter of both directions. The peers loop calls `update` once a second."""

    def __post_init__(self) -> None:
        self._refused: Sequence[RefusedSender] = ()
        self._refusing: Sequence[RefusedSender] = ()
        self._claims = RefusingPeers()
        self._log_refused, self._log_refusing = RefusalLog(), RefusalLog()

    async def update(self) -> None:
        """Read the present state, and log what is new."""
        now, known = time.time(), await self.gossip.known_members()
        self._refused = self.peers.refused_senders()
        self._refusing = self._claims.update(self._claims_of(known), now=now)
        begun, ended = self._log_refused.news(self._refused, now=now)
        for sender in begun:
            if sender.reason != BY_OPERATOR:  # who knows it
                self._report("peer_refused", sender, "the groups of %s are refused as %s")
        for peer_id in ended:
            log.info("the groups of %s are no longer refused", self.peers.registry.label(peer_id))
        begun, ended = self._log_refusing.news(self._refusing, now=now)
        for peer in begun:
            self._report("refused_by", peer, "%s refuses this node's groups as %s")
        for peer_id in ended:
            log.info("%s no longer refuses this node's groups", self.peers.registry.label(peer_id))

    def refused(self) -> list[RefusalStatus]:
        """Return the senders that this node refuses, those with most groups first."""
        return [self._status(sender) for sender in self._refused[:MAX_SHOWN]]

    def refused_by(self) -> list[RefusalStatus]:
        """Return the peers that say that they refuse this node's groups."""
        return [self._status(peer) for peer in self._refusing[:MAX_SHOWN]]

    def _report(self, event: str, one: RefusedSender, line: str) -> None:
        self.context.events.write(event, peer=one.peer_id, reason=one.reason, num_groups=one.num_groups)
        groups = "1 group" if one.num_groups == 1 else f"{one.num_groups} groups"
        why = f"{one.reason} ({sentence(one.reason)}; {groups}): {advice_for(one.reason)}"
        log.warning(line, self.peers.registry.label(one.peer_id), why)

    def _claims_of(self, peer_ids: Collection[str]) -> dict[str, tuple[str, int]]:
        claims = {peer_id: self._claim_of(peer_id) for peer_id in peer_ids}
        return {peer_id: claim for peer_id, claim in claims.items() if claim is not None}

    def _claim_of(self, peer_id: str) -> tuple[str, int] | None:
        """Return why a peer refuses this node's groups, and how many; None if its record does not say so."""
        record = self.peers.registry.record_of(peer_id)
        if record is None or record.stats is None:
            return None
        own = (one for one in record.stats.refused_senders if one[0] == self.context.peer_id)
        return next(((clipped(reason, REASON_WIDTH), num_groups) for _, reason, num_groups in own), None)

    def _status(self, sender: RefusedSender) -> RefusalStatus:
        return RefusalStatus(
            peer_id=sender.peer_id,
            name=self.peers.registry.name_of(sender.peer_id),
            reason=sender.reason,
            meaning=sentence(sender.reason),
            groups=sender.num_groups,
            since=round(sender.since, 1),
            advice=advice_for(sender.reason),
        )
