"""Which weight offers a generator accepts, and the reason of each refusal."""

from dataclasses import replace

import pytest

from ftis_node.records.identity import Identity
from ftis_node.validation.weights_rules import Follower, refuse_offer
from tests.conftest import RUN_ID, TOKENIZER
from tests.records.test_weights import make_offer

LEARNER = Identity.from_seed(bytes(range(32)))
FOLLOWER = Follower(
    follows=LEARNER.peer_id,
    run_id=RUN_ID,
    tokenizer=TOKENIZER,
    started_from="12" * 16,
    parameters=1_000_000,
    probe_ids=(1, 2, 3),
    takes_adapters=False,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None), ({"started_from": "99" * 16}, None), ({"num_bytes": 4_000_000}, None),
        ({"peer_id": Identity.generate().peer_id}, "peer"), ({"run_id": "cd" * 16}, "run"),
        ({"num_bytes": 4_000_000 + (1 << 20) + 1}, "size"), ({"tokenizer": "00" * 16}, "tokenizer"),
        ({"probe_ids": (1, 2, 999_999)}, "probe"), ({"adapter_config": b"{}"}, "adapter"),
    ],
)  # fmt: skip
def test_an_offer_is_accepted_or_refused_with_its_reason(changes, reason):
    refusal = refuse_offer(make_offer(LEARNER, **changes), FOLLOWER)
    assert (refusal and refusal.reason) == reason


def test_an_adapter_for_another_model_is_refused():
    follower = replace(FOLLOWER, takes_adapters=True)
    assert refuse_offer(make_offer(LEARNER, adapter_config=b"{}"), follower) is None
    refusal = refuse_offer(make_offer(LEARNER, adapter_config=b"{}", started_from="99" * 16), follower)
    assert refusal.reason == "model"
