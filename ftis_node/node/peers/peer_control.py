"""The operator's actions on peers: on a running node through its local HTTP port, on a stopped node in its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ftis_node.config.home import Home
from ftis_node.config.limits import AccessSection
from ftis_node.config.section import first_problem
from ftis_node.errors import DamagedError, UsageError
from ftis_node.files import read_object
from ftis_node.node.peers.manager import PeerManager
from ftis_node.swarm.peer_rows import find_peer
from ftis_node.telemetry.events import EventLog

ACTIONS = ("ban", "unban", "trust")
MAX_BAN_S = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class PeerControl:
    """Changes bans and trust of peers. `rows` are those of `peers --json`, to resolve names and shortened ids."""

    peers: PeerManager
    rows: Callable[[], list[dict[str, Any]]]

    def change(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do one of ACTIONS for the peer that `arguments["peer"]` names, and return its new row.

        `ban` takes `for_s` (seconds, by default the settings' longest time), `trust` takes `trusted`. Raise UsageError.
        """
        peer_id = find_peer(str(arguments.get("peer", "")), self.rows())
        match action:
            case "ban":
                self.peers.ban(peer_id, _ban_length_s(arguments.get("for_s")))
            case "unban":
                self.peers.unban(peer_id)
            case "trust":
                self.peers.trust(peer_id, arguments.get("trusted", True) is True)
            case _:
                raise UsageError(f"{action!r} is none of {', '.join(ACTIONS)}")
        return {"peer_id": peer_id, **self.peers.row(peer_id)}


@contextmanager
def stopped_peers(home: Home) -> Iterator[PeerControl]:
    """Yield the control over a stopped node's file, with the settings of its last start. The caller holds the lock."""
    with closing(EventLog(home.events)) as events:
        settings = read_object(home.settings) if home.settings.exists() else {}
        status = read_object(home.status) if home.status.exists() else {}
        node, saved = status.get("node"), status.get("peers")
        own_id = str(node.get("peer_id", "")) if isinstance(node, dict) else ""
        rows = [row for row in saved if isinstance(row, dict)] if isinstance(saved, list) else []
        access = _access_of(settings, home)
        with closing(PeerManager(home.peers, own_id=own_id, settings=access, events=events)) as peers:
            known = [{"peer_id": peer_id} for peer_id in peers.known()]
            yield PeerControl(peers, lambda: [*rows, *known])


def _access_of(settings: Mapping[str, Any], home: Home) -> AccessSection:
    try:
        return AccessSection.model_validate(settings.get("access", {}))
    except ValidationError as error:
        raise DamagedError(
            f"{home.settings} is damaged ({first_problem(error)}): remove it; the next start writes it again"
        ) from None


def _ban_length_s(duration_s: object) -> float | None:
    if duration_s is None:
        return None
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float) or not 0 < duration_s <= MAX_BAN_S:
        raise UsageError(f"a ban lasts more than 0 and at most {MAX_BAN_S:.0f} s, not {duration_s!r:.40}")
    return float(duration_s)
