"""An engine in this process behind the client's `generate`: for commands that run no daemon."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ftis_node.generation.engines.base import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftis_node.generation.engines.base import Engine, GenerationResult
    from ftis_node.records.group import SamplingSettings


class LocalGenerator:
    """An adapter from `engine` to the `generate` of `client.GenerationClient`."""

    def __init__(self, engine: Engine, *, eos_ids: Iterable[int]) -> None:
        self._engine = engine
        self._eos_ids = frozenset(eos_ids)
        self._numbers = itertools.count()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        sampling: SamplingSettings,
        max_tokens: int,
        seed: int | None = None,
    ) -> GenerationResult:
        """Generate one group, unscored."""
        request = GenerateRequest(
            request_id=f"local-{next(self._numbers)}",
            prompt_ids=tuple(prompt_ids),
            num_completions=num_completions,
            sampling=sampling,
            max_tokens=max_tokens,
            eos_ids=self._eos_ids,
            seed=seed,
        )
        return await self._engine.generate(request)
