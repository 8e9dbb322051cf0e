"""Advice to update: a peer with an older wire version, or this node if most members have a newer one."""

from __future__ import annotations

import pytest

from ftis_node.node.peers.registry import count_other_versions, describe_peer_version


def test_the_description_names_the_side_to_update() -> None:
    assert describe_peer_version(None, ours=1) == describe_peer_version(1, ours=1) == ""
    assert (
        describe_peer_version(2, ours=1)
        == "speaks wire 2, newer than this node's 1: update ftis-node here to receive its groups"
    )
    assert (
        describe_peer_version(0, ours=1)
        == "speaks wire 0, older than this node's 1: its operator must update ftis-node"
    )


@pytest.mark.parametrize(
    ("schemas", "num_newer", "num_older", "is_due"),
    [
        ([], 0, 0, False),
        ([1, 1, None], 0, 0, False),
        ([2, 1], 1, 0, False),
        ([2, 3, 1], 2, 0, True),
        ([2, None, None], 1, 0, False),
        ([0, 0, 0], 0, 3, False),
        ([2], 1, 0, True),
    ],
)
def test_this_node_must_be_updated_if_most_members_are_newer(
    schemas: list[int | None], num_newer: int, num_older: int, is_due: bool
) -> None:
    found = count_other_versions(schemas, ours=1)
    assert found[:2] == (num_newer, num_older)
    assert found.advice.endswith(": update ftis-node") is is_due
    assert f"{len(schemas)} members speak wire" in found.advice or not is_due
