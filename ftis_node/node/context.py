"""Context that all components of a node share: settings, run manifest, identity, event log and state.

A constructor takes all other dependencies as arguments. `startup/wiring.py` passes them.
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
    """Record of the five objects that every component may use."""

    settings: NodeSettings
    manifest: RunManifest
    identity: Identity
    events: EventLog
    state: NodeState

    @property
    def peer_id(self) -> str:
        """Return this node's peer id."""
        return self.identity.peer_id


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """Description of the node for peers and users.

    `tokenizer` is the tokenizer's fingerprint (hex). `domain` is the canonical task SPEC that the node generates for,
    "" for the whole task of the run. `training` is one line: full weights or LoRA, with the reason.
    """

    name: str
    model: str
    tokenizer: str
    domain: str = ""
    training: str = ""

    @property
    def tokenizer_prefix(self) -> bytes:
        """Return the first 8 bytes of the tokenizer's fingerprint, as announcements carry them."""
        return bytes.fromhex(self.tokenizer)[:8]
