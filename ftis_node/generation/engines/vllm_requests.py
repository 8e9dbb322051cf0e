"""The adapter from this package's requests to those of vLLM's engine core."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.lora.request import LoRARequest

    from ftis_node.generation.engines.base import GenerateRequest


def core_request(
    request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, adapter: LoRARequest | None, salt: str
) -> EngineCoreRequest:
    """Return the core's request for one sequence. Only requests with equal `salt` share prompts."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def probe_params() -> SamplingParams:
    """Return the settings for log-probs of the prompt itself. vLLM also samples one token, which is ignored."""
    return SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)


def sampling_params(request: GenerateRequest, *, seed: int | None) -> SamplingParams:
    """Return the settings of one completion: it ends at this model's end-of-sequence ids and no others."""
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=request.max_tokens,
        logprobs=0,  # of the sampled token alone
        seed=seed,
        ignore_eos=True,
        stop_token_ids=sorted(request.eos_ids),
        detokenize=False,
    )
