"""Groups that claim the victim's own weights: a peer's word makes no group the victim's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.attacks.victim import goes_on

if TYPE_CHECKING:
    from ftis_node.records.group import Group
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_GROUPS = 6
NO_VERSION = 10**6
LOW = -13.0  # a token: as low as a mean may be


def claiming(group: Group, weights_of: str, version: int) -> Group:
    """The group as if sampled by another's weights, with log-probs far below what these give."""
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


@pytest.mark.parametrize("version", [NO_VERSION, None], ids=["a version that was never published", "the version now"])
async def test_groups_that_claim_our_weights_are_not_taken(
    victim: Victim, attacker: Member, honest: Member, version: int | None
) -> None:
    """The victim publishes no weights, so nobody samples by them."""
    mismatch = (await victim.status())["learner"].get("mismatch_kl")
    now = (await victim.status())["model"]["policy_version"]
    groups = [
        claiming(attacker.group(), attacker.victim_id, now if version is None else version) for _ in range(NUM_GROUPS)
    ]
    await attacker.offer(*groups)

    async def are_judged() -> bool:
        row = await victim.row(attacker.peer_id)
        return row["groups_accepted"] + sum(row["groups_refused"].values()) >= NUM_GROUPS or row["standing"] == "banned"

    await victim.until(are_judged)
    row = await victim.row(attacker.peer_id)
    assert row["groups_accepted"] == 0
    assert row["standing"] == "banned"
    await goes_on(victim, honest)
    after = (await victim.status())["learner"].get("mismatch_kl")
    assert not (mismatch and after) or after < mismatch + 1.0, "and no figure of ours is moved by it"
