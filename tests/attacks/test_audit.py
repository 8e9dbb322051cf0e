"""False log-probs that look close to the learner.

This file runs first, because the audit needs the initial weights. A peer claims the victim's weights and sends
log-probs that these weights do not give: the audit detects it. A false claim of weights that the victim lacks cannot
be detected. In that case validation bounds the mean (`test_groups.py`), and the loss truncates and filters.
"""

from dataclasses import replace

import numpy as np
import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]


async def test_the_audit_detects_false_logprobs_under_the_learners_weights(victim, scene):
    status = await victim.status()
    assert status["model"]["policy_version"] == 0, "another file of the folder ran first"
    async with scene.member() as attacker:
        for _ in range(3):
            group = attacker.group(model=status["model"]["name"])
            plausible = [
                replace(one, logprobs=np.linspace(-0.5, -0.1, len(one.token_ids), dtype=np.float32),
                        policy_version=0, policy_version_newest=0)
                for one in group.completions
            ]  # fmt: skip
            await attacker.offer(group.with_completions(plausible))
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "logprob_mismatch"))
        await victim.until(lambda: victim.is_banned(attacker.peer_id))
    assert await victim.num_refused("logprob_mismatch") >= 1
