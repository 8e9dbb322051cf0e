"""Tokens drawn across a hand-over by the torch engine: whoever sampled them is who the completion says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from generation_support import (
    CLOSE,
    SETTINGS,
    eventually,
    file_tensors,
    fresh_logprobs,
    make_request,
    mixed_logprobs,
    num_sampled_by_old,
    tiny_model,
)

from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.weight_store import WeightStore
from tests import cpu_sharing

PROMPT = [3, 1, 4]


def test_the_reference_finds_the_token_at_which_the_weights_changed() -> None:
    old, new, ids = tiny_model(), tiny_model(seed=1), [5, 9, 2, 6, 5, 3]
    for number in range(1, 7):
        drawn = mixed_logprobs(old, new, PROMPT, ids, number)
        assert num_sampled_by_old(old, new, PROMPT, ids, drawn) == [number]


@pytest.mark.parametrize("way", ["file", "shared"])
async def test_completions_in_flight_keep_the_version_that_sampled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """This engine ends what is in flight before it takes new weights; what waits meanwhile has them from its start."""
    cpu_sharing.install(monkeypatch.setattr)
    old, new = tiny_model(), tiny_model(seed=1)
    engine = TorchEngine(tiny_model(), SETTINGS)
    options = {"eos_ids": frozenset(), "num_completions": 2, "seed": None}
    early = [
        asyncio.create_task(
            engine.generate(make_request(PROMPT, max_tokens=length, request_id=f"early{length}", **options))
        )
        for length in (40, 64, 90)
    ]
    await eventually(lambda: engine.tokens_made > 30)
    if way == "file":
        loading = engine.load_weights(Path(WeightStore(tmp_path).publish(1, file_tensors(new)).path), 1)
    else:
        loading = engine.load_shared(Exporter().share(file_tensors(new)), 1)
    load = asyncio.create_task(loading)
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(make_request(PROMPT, max_tokens=20, request_id="late", **options)))
    results = await asyncio.gather(*early, late)
    await load
    assert engine.policy_version == 1
    for result, model, version in zip(results, [old, old, old, new], [0, 0, 0, 1], strict=True):
        for completion in result.completions:
            assert (completion.policy_version, completion.policy_version_newest) == (version, version)
            assert np.abs(completion.logprobs - fresh_logprobs(model, PROMPT, completion)).max() < CLOSE
    await engine.close()
