"""Groups that falsely claim the victim's weights are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.attacks.victim import wait_until_continued

if TYPE_CHECKING:
    from ftis_node.records.group import Group
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_GROUPS = 6
UNPUBLISHED_VERSION = 10**6
LOW = -13.0  # nats per token: the lowest mean that validation allows


def with_claimed_weights(group: Group, weights_of: str, version: int) -> Group:
    """Return the group with claimed weights, and log-probs far below those of these weights."""
    rng = np.random.default_rng(group.number)
    completions = [
        replace(
            one,
            logprobs=(LOW + rng.uniform(0, 0.5, len(one.token_ids))).astype(np.float32),
            policy_version=version,
            policy_version_newest=version,
        )
        for one in group.completions
    ]
    return replace(group.with_completions(completions), weights_of=weights_of)


@pytest.mark.parametrize("version", [UNPUBLISHED_VERSION, None], ids=["unpublished version", "current version"])
async def test_groups_that_claim_the_victims_weights_are_rejected(
    victim: Victim, attacker: Member, honest: Member, version: int | None
) -> None:
    """The victim publishes no weights, so no peer can sample with them."""
    mismatch = (await victim.status())["learner"].get("mismatch_kl")
    now = (await victim.status())["model"]["policy_version"]
    groups = [
        with_claimed_weights(attacker.group(), attacker.victim_id, now if version is None else version)
        for _ in range(NUM_GROUPS)
    ]
    await attacker.offer(*groups)

    async def are_validated() -> bool:
        row = await victim.row(attacker.peer_id)
        return row["groups_accepted"] + sum(row["groups_refused"].values()) >= NUM_GROUPS or row["standing"] == "banned"

    await victim.until(are_validated)
    row = await victim.row(attacker.peer_id)
    assert row["groups_accepted"] == 0
    assert row["standing"] == "banned"
    await wait_until_continued(victim, honest)
    after = (await victim.status())["learner"].get("mismatch_kl")
    assert not after or after < (mismatch or 0.0) + 1.0, "the false claims changed the measured mismatch"
