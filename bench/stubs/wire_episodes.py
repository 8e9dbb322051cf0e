"""Episodes for `bench/wire.py`: groups with five turns, their flat form with masks, and their replay by a receiver."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis_node.config.manifest import RunManifest
from ftis_node.lab.tiny_tokenizer import VOCABULARY_SIZE, make_tokenizer
from ftis_node.models import PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.records.codec import hash_observations
from ftis_node.records.group import FinishReason, Group, PromptRef
from ftis_node.tasks.base import ChatMessage, TaskItem
from ftis_node.tasks.episodes.episode import EpisodeTask
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation import ValidationContext
from ftis_node.validation.episode_replay import replay

TURNS, OBSERVED_TOKENS = 5, 90
OBSERVATION = "x " * (OBSERVED_TOKENS // 2)
ITEM = TaskItem(PromptRef("fixed", "train", 0), (ChatMessage(role="user", content="?"),), "")
REPEATS = 30


class FixedEpisode:
    """Five turns. Each text but the last has the same observation."""

    name, split = "fixed", "train"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> TaskItem:
        return ITEM

    def resolve(self, ref: PromptRef) -> TaskItem:
        return ITEM

    def begin(self, item: TaskItem) -> int:
        return 1

    def step(self, state: int, text: str) -> tuple[str | None, int]:
        return (None if state == TURNS else OBSERVATION), state + 1

    def score(self, item: TaskItem, texts: Sequence[str]) -> float:
        return 0.0


def as_episode(group: Group) -> Group:
    """Return the group with `TURNS` turns in each completion."""
    length = group.tokens.lengths[0] // TURNS
    turns = ((int(length),) * TURNS,) * len(group.tokens)
    observations = [[OBSERVATION] * (TURNS - 1)] * len(turns)
    return replace(group, turn_lengths=turns, observation_hash=hash_observations(observations))


def flat_rows(group: Group) -> list[dict[str, Any]]:
    """Return the form of trainers that carry observations: ids, a mask and log-probs of all tokens."""
    rows = []
    for completion in group.completions:
        num_observed = OBSERVED_TOKENS * (TURNS - 1)
        ids = [*completion.token_ids.tolist(), *completion.token_ids[:num_observed].tolist()]
        mask = [True] * len(completion.token_ids) + [False] * (len(ids) - len(completion.token_ids))
        logprobs = [*completion.logprobs.tolist(), *[0.0] * (len(ids) - len(completion.token_ids))]
        rows.append({"token_ids": ids, "mask": mask, "logprobs": logprobs})
    return rows


def replay_seconds(episode: Group) -> float:
    """Return the seconds of the fastest replay of a group, with ids of the tiny models' vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _tiny_tokenizer(Path(folder))
    completions = [
        replace(one, token_ids=_with_ends(one.token_ids, tokenizer), finish_reason=FinishReason.STOP)
        for one in episode.completions
    ]
    made = episode.with_completions(completions)
    group = replace(made, turn_lengths=episode.turn_lengths, end_ids=tokenizer.end_ids)
    return asyncio.run(_fastest_replay(group, tokenizer))


async def _fastest_replay(group: Group, tokenizer: PromptTokenizer) -> float:
    num_tokens = 1 << 12
    manifest = RunManifest(
        name="bench",
        task="guess",
        sampling={"max_prompt_tokens": 64, "max_completion_tokens": num_tokens, "max_total_tokens": num_tokens},
        episode={"max_turns": TURNS, "max_observation_tokens": 2 * OBSERVED_TOKENS},
    )
    times = []
    async with IsolatedScorer(EpisodeTask(FixedEpisode())) as scorer:
        context = ValidationContext(
            manifest=manifest,
            tokenizer=tokenizer,
            resolve=lambda ref, cost: scorer.resolve(ref, cost=cost),
            scorer=scorer,
            is_known=lambda group_id: False,
            has_number=lambda sender, number: False,
        )
        prompt_ids = tokenizer.encode_prompt(ITEM.prompt)
        for _ in range(REPEATS):
            started = time.perf_counter()
            verdict = await replay(group, ITEM, prompt_ids, context, ScoringCost())
            times.append(time.perf_counter() - started)
            assert isinstance(verdict, tuple), verdict
    return min(times)


def _with_ends(ids: np.ndarray, tokenizer: PromptTokenizer) -> np.ndarray:
    """Return ids without special tokens, with an end token after each turn."""
    changed = (3 + ids % (VOCABULARY_SIZE - 3)).astype(np.int32)
    changed[len(ids) // TURNS - 1 :: len(ids) // TURNS] = tokenizer.eos_ids[0]
    return changed


def _tiny_tokenizer(folder: Path) -> PromptTokenizer:
    make_tokenizer().save_pretrained(folder)
    shape = Qwen2Config(
        vocab_size=VOCABULARY_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)  # a folder without weights is no model
    return load_tokenizer(resolve_model(str(folder)))
