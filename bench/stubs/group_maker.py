"""Valid groups of a run by a peer without a model: one right answer and completions of random tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.config.manifest import RunManifest
from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.group import Completion, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.tasks import load_task


class GroupMaker:
    """Maker of groups that pass the run's validation, for nodes with the tokenizer of `model`."""

    def __init__(self, model: Path, manifest: RunManifest) -> None:
        self.manifest = manifest
        self.tokenizer = load_tokenizer(resolve_model(str(model)))
        self._task = load_task(manifest.task)
        self._rng = np.random.default_rng()
        ids = set(range(self.tokenizer.vocab_size)) - set(self.tokenizer.eos_ids)
        self._words = np.array(sorted(ids), dtype=np.int32)

    def group(
        self,
        identity: Identity,
        number: int,
        *,
        num_tokens: int = 24,
        is_solved: bool = True,
        **changes: Any,
    ) -> Group:
        """Return the right answer, if `is_solved`, and completions of `num_tokens` random ids, with true rewards."""
        ref = PromptRef(self.manifest.task, "train", int(self._rng.integers(1 << 30)))
        item = self._task.resolve(ref)
        right = np.array([*self.tokenizer.encode_text(item.answer), self.tokenizer.eos_ids[0]], dtype=np.int32)
        num_others = self.manifest.sampling.group_size - is_solved
        others = [self._rng.choice(self._words, num_tokens) for _ in range(num_others)]
        completions = tuple(
            Completion(
                token_ids=ids,
                logprobs=-self._rng.exponential(1.0, len(ids)).astype(np.float32) - np.float32(1e-3),
                finish_reason=FinishReason.STOP if ids is right else FinishReason.LENGTH,
                reward=self._task.score(item, self.tokenizer.decode(ids.tolist())),
                policy_version=1,
                policy_version_newest=1,
            )
            for ids in (*[right] * is_solved, *others)
        )
        group = Group.from_completions(
            run_id=self.manifest.run_id,
            sender=identity.peer_id,
            number=number,
            prompt_ref=ref,
            problem_hash=hash_messages(item.prompt),
            prompt_hash=hash_prompt(self.tokenizer.encode_prompt(item.prompt)),
            completions=completions,
            sampling=SamplingSettings(),
            model="none",
            tokenizer=self.tokenizer.fingerprint,
            created_at=round(time.time(), 3),
            end_ids=self.tokenizer.end_ids,
        )
        return replace(group, **changes)
