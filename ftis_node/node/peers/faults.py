"""Charges the faults that `swarm/peer_guard.py` catches: to the figures, the event trail and the peer's reputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.records.identity import peer_id_from_text
from ftis_node.swarm.reputation.score import Behaviour

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.node.context import Parts
    from ftis_node.swarm.peer_guard import Place

REASON = "fault"
MAX_TEXT = 200  # characters of an error that an event keeps: a peer may have chosen them


def fault_charger(parts: Parts) -> Callable[[str, Place, Exception], None]:
    """What the guard of a node calls for each fault."""

    def charge(peer_id: str, place: Place, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        parts.counters.refused[REASON] += 1
        if not _is_peer(peer_id):  # nobody that could be charged
            parts.events.write("peer_fault", peer=ascii(peer_id)[:MAX_TEXT], place=place.value, error=what)
            return
        parts.registry.seen(peer_id).refused[REASON] += 1
        parts.events.write("peer_fault", peer=peer_id, place=place.value, error=what)
        parts.peers.note(peer_id, Behaviour.FAULT, reason=REASON, detail=f"{REASON} at {place}: {what}")

    return charge


def _is_peer(peer_id: str) -> bool:
    try:
        peer_id_from_text(peer_id)
    except ValueError:
        return False
    return True
