"""Charges the faults that `swarm/peer_guard.py` catches to the counters, the event log and the peer's reputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.records.identity import peer_id_from_text
from ftis_node.swarm.reputation.score import Behaviour

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.node.context import NodeCounters
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.swarm.peer_guard import Place
    from ftis_node.telemetry.events import EventLog

REASON = "fault"
MAX_TEXT = 200  # most characters of an error in an event: a peer may have chosen the text


def fault_charger(
    *, events: EventLog, counters: NodeCounters, registry: PeerRegistry, peers: PeerManager
) -> Callable[[str, Place, Exception], None]:
    """Return the callback of a node's guard for faults, with arguments (peer id, place, error)."""

    def charge(peer_id: str, place: Place, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        counters.refused[REASON] += 1
        if not _is_peer(peer_id):  # there is no peer to charge
            events.write("peer_fault", peer=ascii(peer_id)[:MAX_TEXT], place=place.value, error=what)
            return
        registry.seen(peer_id).refused[REASON] += 1
        events.write("peer_fault", peer=peer_id, place=place.value, error=what)
        peers.note(peer_id, Behaviour.FAULT, reason=REASON, detail=f"{REASON} at {place}: {what}")

    return charge


def _is_peer(peer_id: str) -> bool:
    try:
        peer_id_from_text(peer_id)
    except ValueError:
        return False
    return True
