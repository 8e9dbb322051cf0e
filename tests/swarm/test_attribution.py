"""Attribution: the signer is at fault for contents, the serving peer for faults that it could detect, else neither."""

from __future__ import annotations

import pytest

from ftis_node.swarm.reasons import attribute_refusal
from ftis_node.swarm.reputation import Behaviour


@pytest.mark.parametrize(
    ("reason", "signed", "blamed", "conduct"),
    [
        ("parse", False, "relay", Behaviour.REFUSED),
        ("signature", False, "relay", Behaviour.FALSE_CLAIM),
        ("run", False, "relay", Behaviour.REFUSED),
        ("banned", False, "relay", Behaviour.HARMLESS),
        ("quota", False, "relay", Behaviour.HARMLESS),
        ("duplicate", True, "relay", Behaviour.HARMLESS),
        ("stale", True, "relay", Behaviour.HARMLESS),
        ("scoring_failed", True, "relay", Behaviour.HARMLESS),
        ("token_out_of_range", True, "signer", Behaviour.REFUSED),
        ("reward_mismatch", True, "signer", Behaviour.FALSE_CLAIM),
        ("duplicate_completions", True, "signer", Behaviour.COPIED),
        ("duplicate_of_own", True, "signer", Behaviour.FALSE_CLAIM),
    ],
)
def test_each_reason_is_attributed_to_the_peer_that_caused_it(
    reason: str, signed: bool, blamed: str, conduct: Behaviour
) -> None:
    assert attribute_refusal(reason, origin="relay", sender="signer", signed=signed) == (blamed, conduct)


def test_a_flood_is_attributed_to_the_sender_only_if_it_served_the_group() -> None:
    assert attribute_refusal("quota", origin="signer", sender="signer", signed=False) == (
        "signer",
        Behaviour.RATE_LIMITED,
    )


def test_an_unsigned_group_is_attributed_to_the_peer_that_served_it() -> None:
    assert attribute_refusal("anything", origin="forger", sender="victim", signed=False) == (
        "forger",
        Behaviour.REFUSED,
    )
