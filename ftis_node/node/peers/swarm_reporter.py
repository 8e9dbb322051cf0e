"""The swarm as a node sees it: the section of its status, and the view of all nodes."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.peer_registry import PeerActivity
from ftis_node.node.peers.swarm_log import RefusalReporter
from ftis_node.swarm.overview import RunSummary, SwarmView, make_view, swarm_row
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.reasons import advice_for, sentence
from ftis_node.swarm.refusals import RefusedSender
from ftis_node.telemetry.status import RefusalStatus, SwarmStatus

MAX_SHOWN = 12  # refused senders and refusing peers in the status


@dataclass(eq=False, repr=False)
class SwarmReporter(NodePart):
    """Reports the swarm as this node sees it: the status section, the rows of its peers, and the view of all nodes."""

    refusals: RefusalReporter

    def view(self) -> SwarmView:
        """Return the view of the swarm: this node and the peers that it saw last."""
        own, rows = self.peers.registry.own_record, []
        met = dict(self.peers.registry.peers)  # a copy: the event loop changes the table, and this may run in a thread
        if own is not None:
            rows.append(swarm_row(own, seen_at=time.time()))
        for peer_id, activity in met.items():
            with self.gossip.guard.work_for(peer_id, Place.STATUS):
                if activity.record is not None:
                    row = swarm_row(activity.record, seen_at=activity.last_seen)
                    rows.append(msgspec.structs.replace(row, receipts=tuple(activity.receipts.values())))
        num_unreadable = sum(activity.record is None for activity in met.values())
        return make_view(
            rows,
            run=RunSummary.of(self.context.manifest),
            now=time.time(),
            own_id=own.peer_id if own else "",
            num_unreadable=num_unreadable,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per peer. If a row raises an error, omit it and charge its peer."""
        met = dict(self.peers.registry.peers)
        rows = []
        for peer_id in [*met, *(peer_id for peer_id in self.peers.known() if peer_id not in met)]:
            with self.gossip.guard.work_for(peer_id, Place.STATUS):
                activity = met.get(peer_id, PeerActivity())
                rows.append({"peer_id": peer_id, **activity.as_dict(), **self.peers.row(peer_id)})
        return rows

    def status(self, *, members: Collection[str]) -> SwarmStatus:
        """Return the section. `members` are the connected members of the run."""
        counters, gossip = self.context.counters, self.gossip
        others = self.peers.registry.other_versions(members)
        tokens = counters.tokens_received
        return SwarmStatus(
            state=str(gossip.state.state),
            reason=gossip.state.reason,
            reachability=str(gossip.reachability),
            clock_skew_s=None if gossip.clock_skew_s is None else round(gossip.clock_skew_s, 3),
            peers_known=len(self.peers.registry.peers),
            peers_connected=len(members),
            groups_sent=counters.groups_sent,
            groups_confirmed=self.peers.confirmations.num_confirmed,
            groups_received=counters.groups_received,
            groups_refused=dict(counters.refused),
            groups_repaired=counters.groups_repaired,
            bytes_in=gossip.counters.envelope_bytes_in,
            bytes_out=gossip.counters.envelope_bytes_out,
            tokens_in=tokens,
            bytes_per_token=round(counters.envelope_bytes_received / tokens, 3) if tokens else None,
            fetch_errors=dict(gossip.counters.fetch_errors),
            serve_errors=dict(gossip.counters.serve_errors),
            announcements_refused=gossip.counters.announcements_refused,
            confirmations_unproven=counters.confirmations_unproven,
            non_ed25519=dict(gossip.counters.non_ed25519),
            weights_bytes_in=gossip.counters.weights_bytes_in,
            weights_bytes_out=gossip.counters.weights_bytes_out,
            weights_age_s=None
            if counters.weights_created_at is None
            else round(time.time() - counters.weights_created_at, 3),
            weights_refused=dict(counters.weights_refused),
            announcements_dropped=gossip.counters.announcements_dropped,
            records_refused=gossip.counters.records_refused,
            peers_newer=others.num_newer,
            peers_older=others.num_older,
            update=others.advice,
            newer_release=self.peers.registry.newer_release(members),
            refused_peers=[self._refusal(sender) for sender in self.refusals.refused[:MAX_SHOWN]],
            refused_by=[self._refusal(peer) for peer in self.refusals.refusing[:MAX_SHOWN]],
            used_by_peers=self.peers.receipts.figures(now=time.time()),
        )

    def _refusal(self, sender: RefusedSender) -> RefusalStatus:
        return RefusalStatus(
            peer_id=sender.peer_id,
            name=self.peers.registry.name_of(sender.peer_id),
            reason=sender.reason,
            meaning=sentence(sender.reason),
            groups=sender.num_groups,
            since=round(sender.since, 1),
            advice=advice_for(sender.reason),
        )
