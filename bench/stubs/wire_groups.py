"""Random groups of usual size, 12 completions of 300 tokens, and the traffic of the loopback interface."""

from __future__ import annotations

import time

import numpy as np
import psutil

from ftis_node.records.codec import hash_prompt
from ftis_node.records.group import Completion, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity

NUM_COMPLETIONS = 12
COMPLETION_TOKENS = 300
VOCABULARY = 151_665  # Qwen2.5's
RUN_ID = "0" * 32


def loopback_bytes() -> int:
    """Return the bytes received on the loopback interface since boot.

    Every byte sent over loopback is received there once. Traffic of other programs is included.
    """
    return int(psutil.net_io_counters(pernic=True, nowrap=False)["lo"].bytes_recv)


def random_group(
    identity: Identity, number: int, rng: np.random.Generator, *, num_tokens: int = COMPLETION_TOKENS
) -> Group:
    """Return a random group with Qwen-like ids and log-probs; `num_tokens` in each completion."""
    return Group.from_completions(
        run_id=RUN_ID,
        sender=identity.peer_id,
        number=number,
        prompt_ref=PromptRef("gsm8k", "train", number),
        problem_hash=bytes(16),
        prompt_hash=hash_prompt([number]),
        completions=tuple(
            Completion(
                token_ids=rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32),
                logprobs=-rng.exponential(0.5, num_tokens).astype(np.float32),
                finish_reason=FinishReason.LENGTH,
                reward=float(rng.integers(0, 2)),
                policy_version=1,
                policy_version_newest=1,
            )
            for _ in range(NUM_COMPLETIONS)
        ),
        sampling=SamplingSettings(),
        model="Qwen/Qwen2.5-3B",
        tokenizer="0" * 32,
        created_at=time.time(),
    )
