"""Advice for members with another wire version or a newer release.

Messages of a peer with another wire version are refused with the reason `version`, without a penalty. Updating the
older of the two nodes resolves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from ftis_node.records.parsing import SCHEMA

UPDATE = "update ftis-node"


class OtherVersions(NamedTuple):
    """Numbers of connected members with a newer and an older wire version; `advice` is empty if no update is due."""

    num_newer: int
    num_older: int
    advice: str


def version_words(theirs: int | None) -> str:
    """Return a clause about a peer whose wire version differs from this node's; "" for none. None: unknown."""
    if theirs is None or theirs == SCHEMA:
        return ""
    if theirs > SCHEMA:
        return f"speaks wire {theirs}, newer than this node's {SCHEMA}: {UPDATE} here to receive its groups"
    return f"speaks wire {theirs}, older than this node's {SCHEMA}: its operator must {UPDATE}"


def newer_release(versions: Iterable[str | None], *, ours: str) -> str:
    """Return a clause if more than half of the members say that they run a newer release; else "". None: no record.

    The clause names the newest release that this majority has at least, so that a few false claims do not decide it.
    """
    claims = [_parsed(version) for version in versions]
    known = sorted((version for version in claims if version is not None), reverse=True)
    own, majority = _parsed(ours), len(claims) // 2 + 1
    if own is None or len(known) < majority or known[majority - 1] <= own:
        return ""
    num_newer = sum(version > own for version in known)
    return f"{num_newer} of {len(claims)} members run {known[majority - 1]} or newer, this node {own}: {UPDATE}"


def _parsed(version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def other_versions(schemas: Sequence[int | None]) -> OtherVersions:
    """Count the members with another wire version, None if unknown. Advise an update if most members are newer."""
    newer = [schema for schema in schemas if schema is not None and schema > SCHEMA]
    num_older = sum(schema is not None and schema < SCHEMA for schema in schemas)
    advice = f"{len(newer)} of {len(schemas)} members speak wire {max(newer, default=0)}, this node {SCHEMA}: {UPDATE}"
    return OtherVersions(len(newer), num_older, advice if 2 * len(newer) > len(schemas) else "")
