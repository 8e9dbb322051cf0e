"""What to do if groups are refused, by reason. Each text holds for both nodes: the refusing one and the sender."""

from __future__ import annotations

from ftis_node.swarm.reputation import BY_OPERATOR

READ_MORE = "ftis-node docs reference/rejections"
SAME_RELEASE = "install the same release of ftis-node on both nodes"
CLOCKS = "switch on time synchronization (systemd-timesyncd, chrony) on both nodes"
ADVICE = {
    "tokenizer": 'use models of one family, or a run with step.other_tokenizers = "text"',
    "finish_reason": SAME_RELEASE,
    "opening": f"{SAME_RELEASE}, and check the sender's chat template",
    "too_long_here": "raise sampling.max_total_tokens in the run, or use shorter chat templates",
    "prompt_mismatch": "use the same data file, and the same releases of ftis-node and of the task, on both nodes",
    "reward_mismatch": "install the same releases of ftis-node and of the graders on both nodes",
    "not_encodable": "use models of one family",
    "version": SAME_RELEASE,
    "codec": SAME_RELEASE,
    "malformed": SAME_RELEASE,
    "wrong_encoding": SAME_RELEASE,
    "parse": SAME_RELEASE,
    "clock_skew": CLOCKS,
    "stale": f"{CLOCKS}; on a slow link raise step.max_age_s in the run",
    "size": "raise wire.max_envelope_bytes in the run, or generate shorter completions",
    "no_embedding": "use a model whose embedding has a row for each token of the tokenizer",
    "token_out_of_range": "compare the tokenizers: the sender's has more ids",
    "logprobs": "check the sender's engine (the warning `mismatch` in its log)",
    "logprob_mismatch": "check the sender's engine: the warning `mismatch` in its log",
    "understated_logprobs": "check the sender's engine: the warning `mismatch` in its log",
    "quota": "send fewer groups",
    "announcement_flood": "send fewer groups",
    "scoring_quota": "send shorter completions or fewer groups: scoring them takes too long",
    "scoring_timeout": "shorter problems or completions: scoring one took the whole time limit",
    "scoring_failed": "the refusing node is too busy: fewer groups per step, or more cores",
    "sequence_reused": "one home per node: two nodes use the same identity.key",
    "duplicate_completions": "give each node its own home and seed: two send the same completions",
    "duplicate_of_own": "give each node its own home and seed: two send the same completions",
    "weights_not_offered": "restart the follower: it names weights that its learner does not offer",
    "banned": "the refusing node's operator may end it: ftis-node peers unban PEER",
    BY_OPERATOR: "the refusing node's operator may end it: ftis-node peers unban PEER",
    "fault": "report the line of the refusing node's log; install the same release on both nodes",
}


def advice_for(reason: str) -> str:
    """Return what to do, as a clause."""
    return ADVICE.get(reason, READ_MORE)
