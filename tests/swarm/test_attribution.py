"""Attribution: the signer is at fault for contents, the serving peer for faults that it could detect, else neither."""

import pytest

from ftis_node.swarm.reasons import attribute_refusal
from ftis_node.swarm.reputation import Behaviour


@pytest.mark.parametrize(
    ("reason", "signed", "blamed", "behaviour"),
    [
        ("signature", False, "relay", Behaviour.FALSE_CLAIM),
        ("run", False, "relay", Behaviour.REFUSED),
        ("quota", False, "relay", Behaviour.HARMLESS),
        ("scoring_failed", True, "relay", Behaviour.HARMLESS),
        ("reward_mismatch", True, "signer", Behaviour.FALSE_CLAIM),
    ],
)
def test_a_reason_is_attributed_to_the_peer_that_caused_it(reason, signed, blamed, behaviour):
    assert attribute_refusal(reason, origin="relay", sender="signer", signed=signed) == (blamed, behaviour)


def test_a_flood_is_attributed_to_the_sender_only_if_it_served_the_group():
    assert attribute_refusal("quota", origin="signer", sender="signer", signed=False) == (
        "signer",
        Behaviour.RATE_LIMITED,
    )


def test_an_unsigned_group_is_attributed_to_the_peer_that_served_it():
    assert attribute_refusal("anything", origin="forger", sender="victim", signed=False) == (
        "forger",
        Behaviour.REFUSED,
    )
