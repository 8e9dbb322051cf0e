"""Groups that are made here, as messages of the learner."""

from __future__ import annotations

from collections.abc import Sequence

from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.records.codec import hash_prompt, pack_group
from ftis_node.records.group import CompletionStatus, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.records.token_batch import TokenBatch

HEADER = {
    "run_id": "0" * 32,
    "sender": Identity.from_seed(bytes(32)).peer_id,
    "number": 1,
    "prompt_ref": PromptRef("synthetic", "train", 0),
    "problem_hash": bytes(16),
    "prompt_hash": bytes(4),
    "sampling": SamplingSettings(),
    "model": "synthetic",
    "tokenizer": "0" * 32,
    "created_at": 0.0,
}


def token_body(
    prompt_ids: Sequence[int],
    tokens: TokenBatch,
    rewards: Sequence[float],
    *,
    versions: tuple[int, int],
    finish_reasons: Sequence[FinishReason] = (),
) -> bytes:
    """Return the body of a group of these tokens, which `versions` sampled: its first and its last token."""
    number = len(tokens)
    packed = Group(
        **HEADER | {"prompt_hash": hash_prompt(prompt_ids)},  # type: ignore[arg-type]
        tokens=tokens,
        finish_reasons=tuple(finish_reasons) or (FinishReason.LENGTH,) * number,
        rewards=tuple(rewards),
        statuses=(CompletionStatus.SCORED,) * number,
        policy_versions=(versions[0],) * number,
        policy_versions_newest=(versions[1],) * number,
    )
    return pack_group(packed)


async def sample(
    client: GenerationClient, prompt: Sequence[int], *, num: int, tokens: int, sampling: SamplingSettings | None = None
) -> GenerationResult:
    """Sample `num` completions of `tokens` tokens, which no end token shortens."""
    request = GenerateRequest(
        prompt_ids=tuple(prompt),
        num_completions=num,
        sampling=sampling or SamplingSettings(),
        max_tokens=tokens,
        eos_ids=frozenset(),
    )
    return await client.generate(request)
