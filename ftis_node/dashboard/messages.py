"""Messages from the snapshot threads to the screens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from ftis_node.dashboard.buffer_reader import GroupDetail
    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.replay.reader import GroupSummary


@dataclass
class NodeSeen(Message):
    """New snapshot of the node."""

    snapshot: NodeSnapshot


@dataclass
class GroupsListed(Message):
    """Groups that a screen requested. `problem` is the reason why the list is empty."""

    groups: list[GroupSummary]
    problem: str = ""


@dataclass
class GroupOpened(Message):
    """Group that a screen requested; None if the buffer no longer has it."""

    group: GroupDetail | None
    problem: str = ""


@dataclass
class SwarmRead(Message):
    """Lines of the swarm's view, or the reason why they are missing."""

    lines: list[str]
