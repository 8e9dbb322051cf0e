"""What is the same for all components of one node: settings, run manifest, identity, event log and state.

Everything else that a loop or a component uses is an argument of its constructor. `startup/wiring.py` passes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.node.state import NodeState
    from ftis_node.records.identity import Identity
    from ftis_node.telemetry.events import EventLog


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The five objects that every component may use."""

    settings: NodeSettings
    manifest: RunManifest
    identity: Identity
    events: EventLog
    state: NodeState

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self.identity.peer_id


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """How the node describes itself to peers and users.

    `tokenizer` is the fingerprint (hex). `domain` is the canonical task SPEC that the node generates for, "" for the
    whole task of the run. `training` says in one line what is trained, and why.
    """

    name: str
    model: str
    tokenizer: str
    domain: str = ""
    training: str = ""

    @property
    def tokenizer_prefix(self) -> bytes:
        """The first 8 bytes of the fingerprint, as announcements carry them."""
        return bytes.fromhex(self.tokenizer)[:8]
