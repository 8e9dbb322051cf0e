"""Reports of refused groups, in both directions: senders that this node refuses, and peers that refuse this node's.

Each node's directory record names some of the senders that it refuses. So a sender learns it, even if it is banned. The
log has one line for each sender or peer and reason; the status and the dashboard show the present state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftis_node.gossip import Gossip
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.manager import PeerManager
from ftis_node.swarm.reasons import advice_for, sentence
from ftis_node.swarm.refusals import RefusalLog, RefusedSender
from ftis_node.swarm.reputation import BY_OPERATOR
from ftis_node.telemetry.status import RefusalStatus
from ftis_node.telemetry.terminal_text import clipped, printable

log = logging.getLogger(__name__)
MAX_SHOWN = 12  # in the status
NAME_WIDTH, REASON_WIDTH, ID_TAIL = 24, 32, 8


@dataclass(eq=False, repr=False)
class RefusalReporter:
    """Reporter of both directions. The peers loop calls `update` once a second."""

    context: NodeContext
    gossip: Gossip
    peers: PeerManager

    def __post_init__(self) -> None:
        self._refused: Sequence[RefusedSender] = ()
        self._refusing: Sequence[RefusedSender] = ()
        self._log_refused, self._log_refusing = RefusalLog(), RefusalLog()

    async def update(self) -> None:
        """Read the present state, and log what is new."""
        now, known = time.time(), await self.gossip.known_members()
        self._refused = self.peers.refused_senders()
        since = {peer.peer_id: peer.since for peer in self._refusing}
        self._refusing = [
            RefusedSender(peer_id, *claim, since.get(peer_id, now)) for peer_id, claim in self._claims_of(known).items()
        ]
        begun, ended = self._log_refused.news(self._refused, now=now)
        for sender in begun:
            self._report_refused(sender)
        for peer_id in ended:
            log.info("the groups of %s are no longer refused", self._label(peer_id))
        begun, ended = self._log_refusing.news(self._refusing, now=now)
        for peer in begun:
            self._report_refusing(peer)
        for peer_id in ended:
            log.info("%s no longer refuses this node's groups", self._label(peer_id))

    def refused(self) -> list[RefusalStatus]:
        """Return the senders that this node refuses, those with most groups first."""
        return self._statuses(self._refused)

    def refused_by(self) -> list[RefusalStatus]:
        """Return the peers that say that they refuse this node's groups."""
        return self._statuses(self._refusing)

    def _report_refused(self, sender: RefusedSender) -> None:
        if sender.reason == BY_OPERATOR:  # who knows it
            return
        words = _words(sender)
        self.context.events.write(
            "peer_refused", peer=sender.peer_id, reason=sender.reason, num_groups=sender.num_groups
        )
        log.warning("the groups of %s are refused as %s", self._label(sender.peer_id), words)

    def _report_refusing(self, peer: RefusedSender) -> None:
        words = _words(peer)
        self.context.events.write("refused_by", peer=peer.peer_id, reason=peer.reason, num_groups=peer.num_groups)
        log.warning("%s refuses this node's groups as %s", self._label(peer.peer_id), words)

    def _statuses(self, senders: Sequence[RefusedSender]) -> list[RefusalStatus]:
        return [self._status(sender) for sender in senders[:MAX_SHOWN]]

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
            name=self._name(sender.peer_id),
            reason=sender.reason,
            meaning=sentence(sender.reason),
            groups=sender.num_groups,
            since=round(sender.since, 1),
            advice=advice_for(sender.reason),
        )

    def _name(self, peer_id: str) -> str:
        record = self.peers.registry.record_of(peer_id)
        return clipped(record.name, NAME_WIDTH) if record is not None else ""

    def _label(self, peer_id: str) -> str:
        return peer_label(self._name(peer_id), peer_id)


def peer_label(name: str, peer_id: str) -> str:
    """Return a peer's name and the end of its id, for a line of text."""
    tail = f"..{printable(peer_id)[-ID_TAIL:]}"
    return f"peer {name} ({tail})" if name else f"peer {tail}"


def _words(sender: RefusedSender) -> str:
    groups = "1 group" if sender.num_groups == 1 else f"{sender.num_groups} groups"
    return f"{sender.reason} ({sentence(sender.reason)}; {groups}): {advice_for(sender.reason)}"
