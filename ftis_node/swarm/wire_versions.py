"""Peers with another wire version: describes one, and detects that this node is outdated.

Pure: numbers in, text out. Messages of such a peer are rejected with the reason `version`, without a penalty. Updating
the older of the two nodes resolves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

UPDATE = "update ftis-node"


class OtherVersions(NamedTuple):
    """Numbers of connected members with a newer and an older wire version; `advice` is empty if no update is due."""

    num_newer: int
    num_older: int
    advice: str


def describe_peer_version(theirs: int | None, *, ours: int) -> str:
    """Return a clause about a peer whose messages have schema `theirs`; empty if it is ours or unknown."""
    if theirs is None or theirs == ours:
        return ""
    if theirs > ours:
        return f"speaks wire {theirs}, newer than this node's {ours}: {UPDATE} here to receive its groups"
    return f"speaks wire {theirs}, older than this node's {ours}: its operator must {UPDATE}"


def count_other_versions(schemas: Iterable[int | None], *, ours: int) -> OtherVersions:
    """Count the connected members' schemas (None: unknown). Advise an update if most members are newer."""
    members = list(schemas)
    newer = [schema for schema in members if schema is not None and schema > ours]
    num_older = sum(schema is not None and schema < ours for schema in members)
    if 2 * len(newer) <= len(members):
        return OtherVersions(len(newer), num_older, "")
    advice = f"{len(newer)} of {len(members)} members speak wire {max(newer)}, this node {ours}: {UPDATE}"
    return OtherVersions(len(newer), num_older, advice)
