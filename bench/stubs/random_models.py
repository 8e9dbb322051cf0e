"""Models with realistic shapes and random weights, for measurements without downloads.

`12m`, `12m-wide` (fewer and wider layers, for the learner) and `110m` run on a CPU. `0.5b` and `3b` have the shapes of
Qwen2.5's models. `0.5b-narrow` has the layers of `0.5b` with tiny widths. The tokenizer is that of the tiny models. On
request it has an entry for each row of the embedding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis_node.lab.tiny_tokenizer import make_tokenizer
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.messages import TrainGroup
from ftis_node.models.library_logging import quiet_library_logging
from ftis_node.records.codec import hash_prompt, pack_group, pack_text_group
from ftis_node.records.group import (
    CompletionStatus,
    FinishReason,
    Group,
    PromptRef,
    SamplingSettings,
    TextCompletion,
    TextGroup,
)
from ftis_node.records.identity import Identity
from ftis_node.records.token_batch import TokenBatch

SHARD_SIZE: Final = "2GB"
KEPT_MODELS: Final = Path(tempfile.gettempdir()) / "ftis-bench-models"  # vLLM's compiled code is for a model's path
SENDER = Identity.from_seed(bytes(32)).peer_id
HEADER = {
    "run_id": "0" * 32,
    "sender": SENDER,
    "number": 1,
    "prompt_ref": PromptRef("synthetic", "train", 0),
    "problem_hash": bytes(16),
    "prompt_hash": bytes(4),
    "sampling": SamplingSettings(),
    "model": "synthetic",
    "tokenizer": "0" * 32,
    "created_at": 0.0,
}


def pack_train_group(group: UnpackedGroup) -> TrainGroup:
    """Return the message that unpacks to `group`. The header of its body has placeholder values."""
    return msgspec.structs.replace(
        group.sent,
        body=_text_body(group) if group.mean_logprobs else _token_body(group),
        text_token_ids=tuple(tuple(ids.tolist()) for ids in group.tokens.ids_of_each()) if group.mean_logprobs else (),
    )


def own_group(
    name: str,
    prompt_ids: Sequence[int] | NDArray[Any],
    tokens: TokenBatch,
    rewards: Iterable[float],
    *,
    versions: tuple[int, int] = (0, 0),
) -> UnpackedGroup:
    """Return an own group of these tokens, which `versions` sampled: its first and its last token."""
    prompt = np.asarray(prompt_ids, dtype="<i4").tobytes()
    sent = TrainGroup(name, name, own=True, body=b"", prompt_ids=prompt, rewards=tuple(rewards))
    return UnpackedGroup(sent, tokens, *versions)


def with_logprobs(group: UnpackedGroup, logprobs: NDArray[Any]) -> UnpackedGroup:
    """Return the group with its log-probs replaced by these `[n]`."""
    return replace(group, tokens=replace(group.tokens, logprobs=logprobs.astype(np.float32)))


def _token_body(group: UnpackedGroup) -> bytes:
    num_completions = len(group.tokens)
    packed = Group(
        **HEADER | {"prompt_hash": hash_prompt(group.prompt_ids)},  # type: ignore[arg-type]
        tokens=group.tokens,
        finish_reasons=group.finish_reasons or (FinishReason.LENGTH,) * num_completions,
        rewards=group.sent.rewards,
        statuses=(CompletionStatus.SCORED,) * num_completions,
        policy_versions=(group.policy_version,) * num_completions,
        policy_versions_newest=(group.policy_version_newest,) * num_completions,
    )
    return pack_group(packed)


def _text_body(group: UnpackedGroup) -> bytes:
    completions = tuple(
        TextCompletion("", mean, int(length), FinishReason.LENGTH, reward)
        for mean, length, reward in zip(group.mean_logprobs, group.tokens.lengths, group.sent.rewards, strict=True)
    )
    packed = TextGroup(
        **HEADER | {"prompt_hash": hash_prompt(group.prompt_ids)},  # type: ignore[arg-type]
        policy_version=group.policy_version,
        policy_version_newest=group.policy_version_newest,
        exact_group=bytes(32),
        completions=completions,
    )
    return pack_text_group(packed)


def _shape(
    vocab_size: int, hidden_size: int, intermediate_size: int, layers: int, heads: int, kv: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": True,
    }


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "12m": _shape(8192, 256, 1408, 8, 4, 2),
    "12m-wide": _shape(8192, 256, 1920, 6, 4, 2),
    "110m": _shape(32768, 768, 2048, 12, 12, 4),
    "0.5b-narrow": _shape(512, 64, 128, 24, 4, 2),
    "0.5b": _shape(151936, 896, 4864, 24, 14, 2),
    "3b": _shape(151936, 2048, 11008, 36, 16, 2),
}


def kept_model(shape: str, *, dtype: torch.dtype, device: str = "cpu") -> Path:
    """Return the folder of a random model, and write it if no earlier measurement did."""
    folder = KEPT_MODELS / f"{shape}-{str(dtype).removeprefix('torch.')}"
    if not folder.exists():
        KEPT_MODELS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT_MODELS) as scratch:
            save_random_model(shape, Path(scratch) / "model", dtype=dtype, device=device)
            (Path(scratch) / "model").rename(folder)
    return folder


def save_random_model(
    shape: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    pads_tokenizer: bool = False,
    device: str = "cpu",
) -> int:
    """Write a model folder of that shape in the hub's format. `vocab_size` None means that of the shape.

    The weights are created in `dtype` on `device`, so memory holds them only once. `pads_tokenizer` gives every token
    id of the embedding a text, as in a real model. Return the number of parameters.
    """
    torch.manual_seed(0)
    sizes = SHAPES[shape] | ({} if vocab_size is None else {"vocab_size": vocab_size})
    tokenizer = make_tokenizer(sizes["vocab_size"] if pads_tokenizer else None)
    config = Qwen2Config(**sizes, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with quiet_library_logging():
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(folder)
    return int(model.num_parameters())
