"""Log-probs of a completion that two versions of the weights sampled, by plain forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CLOSE = 1e-3  # nats; two random models differ by far more on some token


def mixed_logprobs(old: Any, new: Any, prompt: list[int], token_ids: list[int], num_old: int) -> Any:
    """Log-probs where `old` sampled the first `num_old` tokens and `new` the others.

    The cache of all positions before the last token that `old` sampled is `old`'s: an engine does not compute it again.
    """
    ids = torch.tensor([[*prompt, *token_ids]])
    begin = len(prompt) + num_old - 1  # the position that predicts the first token of `new`
    with torch.no_grad():
        before = old(input_ids=ids[:, : max(begin, 1)], use_cache=True)
        logits = before.logits[0, len(prompt) - 1 :]
        after = new(input_ids=ids[:, begin:], past_key_values=before.past_key_values, use_cache=True)
        logits = torch.cat([logits, after.logits[0]])[: len(token_ids)]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()


def num_sampled_by_old(old: Any, new: Any, prompt: list[int], token_ids: list[int], logprobs: Any) -> list[int]:
    """Every number of first tokens that `old` may have sampled, by the log-probs that the engine gave.

    Those that a plain pass of `old` agrees on are an upper bound; a few below it may agree by chance.
    """
    wrong = np.abs(mixed_logprobs(old, old, prompt, token_ids, len(token_ids)) - logprobs) > CLOSE
    most = int(wrong.argmax()) if wrong.any() else len(token_ids)
    return [
        number
        for number in range(max(1, most - 2), most + 1)
        if np.abs(mixed_logprobs(old, new, prompt, token_ids, number) - logprobs).max() < CLOSE
    ]
