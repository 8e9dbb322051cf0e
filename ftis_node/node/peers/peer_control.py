"""The operator's actions on peers, through the local HTTP port of a running node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.node.peers.manager import PeerManager
from ftis_node.swarm.peer_rows import find_peer

ACTIONS = ("ban", "unban", "trust")
MAX_BAN_S = 10 * 365 * 86400.0


def change_peer(
    peers: PeerManager, rows: Callable[[], list[dict[str, Any]]], action: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Do one of ACTIONS for the peer that `arguments["peer"]` names, and return its new row.

    `rows` are those of `peers --json`, to resolve names and shortened ids. `ban` takes `for_s` (seconds, by default the
    settings' longest time), `trust` takes `trusted`. Raise UsageError.
    """
    peer_id = find_peer(str(arguments.get("peer", "")), rows())
    match action:
        case "ban":
            peers.ban(peer_id, _ban_length_s(arguments.get("for_s")))
        case "unban":
            peers.unban(peer_id)
        case "trust":
            peers.trust(peer_id, arguments.get("trusted", True) is True)
        case _:
            raise UsageError(f"{action!r} is none of {', '.join(ACTIONS)}")
    return {"peer_id": peer_id, **peers.row(peer_id)}


def _ban_length_s(duration_s: object) -> float | None:
    if duration_s is None:
        return None
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float) or not 0 < duration_s <= MAX_BAN_S:
        raise UsageError(f"a ban lasts more than 0 and at most {MAX_BAN_S:.0f} s, not {duration_s!r:.40}")
    return float(duration_s)
