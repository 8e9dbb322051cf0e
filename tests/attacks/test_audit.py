"""Log-probs made to look close to the learner. First of all, while the victim still has the weights it started from.

A peer that names the victim's weights and pleases it with log-probs that these do not give is found out by the audit.
Where it names weights that the victim does not have, nobody can: there the mean is bounded (`test_contents.py`), and
the cap and the filter of the loss bound what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.attacks.member import joined

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]


async def test_pleasing_logprobs_under_the_learners_own_name_are_found_out(
    victim: Victim, maker: GroupMaker, sockets: Path
) -> None:
    status = await victim.status()
    assert status["model"]["policy_version"] == 0, "no file of the folder comes before this one"
    async with joined(sockets / "audited", maker, victim) as attacker:
        for _ in range(3):
            group = attacker.group(model=status["model"]["name"])
            pleasing = [
                replace(one, logprobs=np.linspace(-0.5, -0.1, len(one.token_ids), dtype=np.float32),
                        policy_version=0, policy_version_newest=0)
                for one in group.completions
            ]  # fmt: skip
            await attacker.offer(group.with_completions(pleasing))
        await victim.until(lambda: victim.blames(attacker.peer_id, "logprob_mismatch"))
        await victim.until(lambda: victim.is_banned(attacker.peer_id))
    assert await victim.refused("logprob_mismatch") >= 1
