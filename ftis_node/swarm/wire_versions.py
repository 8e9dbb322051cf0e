"""Peers that speak another version of the wire: what is said of one, and when it is this node that is behind.

Pure: numbers in, words out. What such a peer says is refused under the name `version` and never held against it; what
it can do is be updated, or have this node updated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

UPDATE = "update ftis-node"


class OtherVersions(NamedTuple):
    """How many connected members speak a newer and an older wire than ours; `advice` is empty where none is due."""

    num_newer: int
    num_older: int
    advice: str


def describe_peer_version(theirs: int | None, *, ours: int) -> str:
    """A clause about a peer whose messages have the schema `theirs`; empty where it is ours, or not known."""
    if theirs is None or theirs == ours:
        return ""
    if theirs > ours:
        return f"speaks wire {theirs}, newer than this node's {ours}: {UPDATE} here to hear it"
    return f"speaks wire {theirs}, older than this node's {ours}: its operator must {UPDATE}"


def count_other_versions(schemas: Iterable[int | None], *, ours: int) -> OtherVersions:
    """Of the connected members' schemas, None for one that is not known yet. Advice is due where most are newer."""
    members = list(schemas)
    newer = [schema for schema in members if schema is not None and schema > ours]
    num_older = sum(schema is not None and schema < ours for schema in members)
    if 2 * len(newer) <= len(members):
        return OtherVersions(len(newer), num_older, "")
    advice = f"{len(newer)} of {len(members)} members speak wire {max(newer)}, this node {ours}: {UPDATE}"
    return OtherVersions(len(newer), num_older, advice)
