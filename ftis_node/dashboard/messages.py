"""What the threads tell the screen."""

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
    """The watcher looked at the node."""

    snapshot: NodeSnapshot


@dataclass
class GroupsListed(Message):
    """The groups that were asked for; `problem` says why there are none to be had."""

    groups: list[GroupSummary]
    problem: str = ""


@dataclass
class GroupOpened(Message):
    """The group that was asked for; None where it is not kept any more."""

    group: GroupDetail | None
    problem: str = ""
