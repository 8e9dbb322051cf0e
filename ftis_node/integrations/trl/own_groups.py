"""A trainer's own rows as groups for its exchange node."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftis_node.node.exchange.messages import OwnGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the trainer samples. `tokenizer` is a fingerprint (hex)."""

    tokenizer: str
    group_size: int
    temperature: float
    top_p: float
    top_k: int


def own_groups(
    batch: Mapping[str, Any], logprobs: Tensor, problems: Sequence[int], sampler: Sampler, *, policy_version: int
) -> Iterator[OwnGroup]:
    """Yield the groups of TRL's batch, `group_size` rows each.

    `logprobs` `[N, T]` are those of the sampling policy. `problems` has the problem's number for each row. A group with
    an empty completion, or with a log-prob that is not finite, is omitted.
    """
    ids, mask = batch["completion_ids"].cpu(), batch["completion_mask"].bool().cpu()
    prompts, prompt_mask = batch["prompt_ids"].cpu(), batch["prompt_mask"].bool().cpu()
    logprobs, now = logprobs.float().cpu(), time.time()
    for first in range(0, len(ids), sampler.group_size):
        rows = range(first, first + sampler.group_size)
        lengths = mask[first : rows.stop].sum(dim=1).tolist()
        of_group = torch.cat([logprobs[row][mask[row]] for row in rows])
        if min(lengths) < 1 or not bool(of_group.isfinite().all()):
            continue
        yield OwnGroup(
            problem=problems[first],
            prompt_ids=_int32(prompts[first][prompt_mask[first]]),
            token_ids=_int32(torch.cat([ids[row][mask[row]] for row in rows])),
            logprobs=of_group.numpy().astype("<f4").tobytes(),
            lengths=lengths,
            policy_version=policy_version,
            tokenizer=sampler.tokenizer,
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            top_k=sampler.top_k,
            created_at=now,
        )


def _int32(ids: Tensor) -> bytes:
    return np.asarray(ids.tolist(), dtype="<i4").tobytes()
