"""The batch: ragged completions in groups, every group with right and wrong ones, log-probs of the model itself.

Prompts have 64-160 tokens, completions 20-384 with many short ones, so that with twelve completions a group 42 % of the
real tokens are prompts. Behaviour log-probs are the model's own with a little noise: no filter drops anything.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from ftis_node.generation.engines.base import GenerationResult
from ftis_node.learner.groups import UnpackedGroup, unpack_train_group
from ftis_node.learner.messages import TrainGroup
from ftis_node.records.token_batch import TokenBatch
from ftis_node.telemetry.log import quiet_library_logging
from ftis_node.workers.weight_store import MEMORY_DISK
from stubs.random_models import own_group, pack_train_group
from stubs.random_models import with_logprobs as filled

PROMPT_TOKENS = (64, 160)
COMPLETION_TOKENS = (20, 384)
SKEW = 1.75  # 1 would spread lengths evenly over the range; the mean is 152 tokens
GROUP_SIZE = 12
NOISE_NATS = 0.02
FIRST_WORD = 5  # smaller ids are special


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of tokens of a batch. `padded` counts the positions of a matrix of padded prompts and completions."""

    completion_tokens: int
    prompt_tokens: int
    prompt_tokens_once: int
    padded: int

    @property
    def real_tokens(self) -> int:
        """Return the tokens of all completions, each with its prompt."""
        return self.completion_tokens + self.prompt_tokens


def ragged_groups(*, num_groups: int, vocab_size: int) -> tuple[UnpackedGroup, ...]:
    """Return groups of twelve completions without log-probs."""
    random = np.random.default_rng(0)
    low, high = COMPLETION_TOKENS
    quantiles = random.permutation(np.linspace(0, 1, num_groups * GROUP_SIZE)).reshape(num_groups, GROUP_SIZE)
    lengths = low + np.rint((1 - (1 - quantiles) ** (1 / SKEW)) * (high - low)).astype(int)
    prompts = random.permutation(np.linspace(*PROMPT_TOKENS, num_groups)).astype(int)
    return tuple(
        _group(number, int(prompt), row.tolist(), random, vocab_size)
        for number, (prompt, row) in enumerate(zip(prompts, lengths, strict=True))
    )


def even_groups(
    *, num_groups: int, completion_tokens: Sequence[int], prompt_tokens: int, vocab_size: int
) -> tuple[UnpackedGroup, ...]:
    """Return groups of equal lengths, so that work is proportional to their number."""
    random = np.random.default_rng(0)
    lengths = list(completion_tokens)
    return tuple(_group(number, prompt_tokens, lengths, random, vocab_size) for number in range(num_groups))


def _group(
    number: int, prompt_tokens: int, lengths: list[int], random: np.random.Generator, vocab: int
) -> UnpackedGroup:
    right = random.permutation(len(lengths)) < random.integers(len(lengths) // 3, 2 * len(lengths) // 3 + 1)
    prompt = random.integers(FIRST_WORD, vocab, prompt_tokens)
    tokens = TokenBatch.from_parts([random.integers(FIRST_WORD, vocab, length) for length in lengths])
    return own_group(str(number), prompt, tokens, map(float, right))


@torch.no_grad()
def with_logprobs(groups: tuple[UnpackedGroup, ...], model: str) -> tuple[TrainGroup, ...]:
    """Return the groups with log-probs of the model, computed row by row, plus noise."""
    random = np.random.default_rng(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet_library_logging():
        causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    packed = []
    for group in groups:
        exact = np.concatenate([_logprobs(causal_lm, group.prompt_ids, ids) for ids in group.tokens.ids_of_each()])
        noisy = exact + random.normal(0.0, NOISE_NATS, group.tokens.num_tokens)
        packed.append(pack_train_group(filled(group, noisy)))
    del causal_lm
    if device == "cuda":
        torch.cuda.empty_cache()  # for the sides
    return tuple(packed)


def with_flat_logprobs(groups: Sequence[UnpackedGroup], vocab_size: int) -> tuple[TrainGroup, ...]:
    """Return the groups with the log-probs of a uniform distribution, without a forward pass."""
    return tuple(
        pack_train_group(filled(group, np.full(group.tokens.num_tokens, -np.log(vocab_size)))) for group in groups
    )


def _logprobs(causal_lm: torch.nn.Module, prompt: NDArray[np.int32], ids: NDArray[np.int32]) -> NDArray[np.float32]:
    row = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64)).to(causal_lm.device)
    logits = causal_lm(row[None], logits_to_keep=len(ids) + 1).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, row[len(prompt) :, None]).squeeze(-1).cpu().numpy()


def of_result(name: str, prompt: Sequence[int], result: GenerationResult, rewards: Sequence[float]) -> UnpackedGroup:
    """Return the group of a sampled result."""
    versions = result.policy_version, result.policy_version_newest
    return own_group(name, prompt, result.tokens, rewards, versions=versions)


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for published weights, in memory if possible, as in a node."""
    return tempfile.TemporaryDirectory(dir=MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None)


def count(groups: Sequence[TrainGroup]) -> Counts:
    """Count the tokens."""
    unpacked = [unpack_train_group(group) for group in groups]
    prompts = [len(group.prompt_ids) for group in unpacked for _ in range(len(group.tokens))]
    completions = [int(length) for group in unpacked for length in group.tokens.lengths]
    return Counts(
        completion_tokens=sum(completions),
        prompt_tokens=sum(prompts),
        prompt_tokens_once=sum(len(group.prompt_ids) for group in unpacked),
        padded=len(prompts) * (max(prompts) + max(completions)),
    )


def spread(total: int, parts: int) -> list[int]:
    """Divide `total` tokens over `parts` completions of increasing length."""
    edges = [round(total * (number / parts) ** 1.5) for number in range(parts + 1)]
    return [high - low for low, high in pairwise(edges)]
