"""The real vLLM engine against plain forward passes: log-probs, versions, ends of completions, and cleanup.

All tests of vLLM share one process (`generation_vllm_support`), most of them one engine.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from generation_support import (
    EMBEDDING_ROWS,
    EOS_ID,
    NEVER,
    PROMPTS,
    STOP_IDS,
    VOCAB_SIZE,
    assert_stopped,
    completions_of,
    damage,
    file_tensors,
    fresh_logprobs,
    make_request,
    tiny_model,
)
from generation_vllm_support import MAX_BATCH, VLLM_MODEL, VLLM_SETTINGS

from ftis_node.config.manifest import EpisodeSection
from ftis_node.errors import ConfigError, EngineError, ModelError, WorkerTaskError
from ftis_node.generation.rollouts import Sampler
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.records.group import Completion, FinishReason, SamplingSettings
from ftis_node.workers.hub_names import hub_tensors
from ftis_node.workers.weight_store import PublishedWeights, probe_logprobs, probe_token_ids, prove, publish_weights
from tests.episodes.test_rollouts import Asks
from tests.models.tiny_experts import save_experts
from tests.models.tiny_models import save_adapter, save_tiny
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

LONG_PROMPT = [(7 * index + 3) % 90 for index in range(100)]  # three blocks of vLLM's cache and a few ids
PROBE_IDS = probe_token_ids(EMBEDDING_ROWS)
ENDLESS = {"max_tokens": 400, "eos_ids": NEVER}
UNTIED = VLLM_MODEL | {"tied": False, "padded_rows_are_likely": True}


def assert_logprobs(model: Any, prompt: list[int], completion: Completion, *, temperature: float = 1.0) -> None:
    """Assert that log-probs are within 1e-5 of a float32 forward pass."""
    expected = fresh_logprobs(model, prompt, completion, temperature=temperature)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def publish(folder: Path, version: int, model: Any) -> PublishedWeights:
    return publish_weights(folder, version, file_tensors(model))


async def test_log_probs_equal_a_fresh_forward_pass_before_and_after_updates(vllm, tmp_path):
    """The same prompts each time, in a batch too small for them: an old cache must not be used."""
    await vllm.serve()
    before = np.zeros(len(PROBE_IDS) - 1)
    for version in range(4):
        learner = tiny_model(seed=version, **VLLM_MODEL)
        if version:
            proof = prove(learner, version=version, vocab_size=EMBEDDING_ROWS)
            await vllm.update_weights(publish(tmp_path, version, learner), proof)
        probed = np.array(await vllm.probe(PROBE_IDS))
        np.testing.assert_allclose(probed, probe_logprobs(learner, PROBE_IDS), atol=1e-5, rtol=0)
        assert np.abs(probed - before).max() > 0.1
        before = probed
        prompts = [*PROMPTS, LONG_PROMPT]
        requests = [make_request(prompt, num_completions=2 + n, seed=None) for n, prompt in enumerate(prompts)]
        assert sum(request.num_completions for request in requests) > MAX_BATCH
        for request, result in zip(requests, await asyncio.gather(*map(vllm.generate, requests)), strict=True):
            assert len(result.tokens) == request.num_completions
            assert (result.policy_version, result.policy_version_newest) == (version, version)
            for completion in completions_of(result):
                assert_logprobs(learner, list(request.prompt_ids), completion)
    assert (vllm.problems, vllm.restarts) == ([], 0)


async def test_tensors_with_other_values_are_found(vllm, tmp_path):
    """Tensors that vLLM packs for a CPU are not compared: the log-probs of the proof show those."""
    await vllm.serve(model=UNTIED, vocab_size=VOCAB_SIZE)
    learner = tiny_model(seed=1, **VLLM_MODEL, tied=False)
    weights = publish(tmp_path / "right", 1, learner)
    assert await vllm.load(weights) is None
    difference = await vllm.load(weights, checksums={name: value ^ 1 for name, value in weights.checksums.items()})
    assert difference is not None
    assert difference.startswith("holds other values than were published in 22 of 22 tensors"), difference
    wrong = publish_weights(tmp_path / "wrong", 1, exchanged(file_tensors(learner)))
    assert await vllm.load(wrong, checksums=weights.checksums) is not None
    proof = prove(learner, version=1, vocab_size=EMBEDDING_ROWS)
    assert proof.rms_difference(await vllm.probe(PROBE_IDS)) > PROOF_TOLERANCES["bfloat16"]


def exchanged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exchange two layers, and embedding and head."""
    others = {"layers.0.": "layers.1.", "layers.1.": "layers.0.", "model.embed_tokens": "lm_head"}
    others["lm_head"] = "model.embed_tokens"
    parts = {name: next((part for part in others if part in name), "") for name in tensors}
    return {name.replace(parts[name], others[parts[name]]) if parts[name] else name: tensors[name] for name in tensors}


async def test_ids_that_are_no_tokens_end_a_completion_as_aborted(vllm, tmp_path):
    """The completion ends at once: no token after such an id is computed. A model of only such ids raises an error."""
    await vllm.serve(model=UNTIED, vocab_size=VOCAB_SIZE)
    request = make_request(PROMPTS[1], num_completions=64, eos_ids=NEVER, seed=None)
    async with asyncio.timeout(30):
        completions = completions_of(await vllm.generate(request))
    aborted = [completion for completion in completions if completion.finish_reason is FinishReason.ABORT]
    assert 0 < len(aborted) < 64
    for completion in completions:
        assert completion.token_ids.size >= 1
        assert completion.token_ids.max() < VOCAB_SIZE
        assert_logprobs(tiny_model(**UNTIED), PROMPTS[1], completion)
    assert all(len(completion.token_ids) < 16 for completion in aborted)
    long = msgspec.structs.replace(request, max_tokens=400, num_completions=16)
    assert max(len(completion.token_ids) for completion in completions_of(await vllm.generate(long))) < 300
    assert not (await vllm.inspect()).is_busy, "tokens after a padded id are computed"
    tensors = file_tensors(tiny_model(**UNTIED))
    head = tensors["lm_head.weight"].zero_()
    head[-1], head[-2] = 1e3, -1e3  # for any hidden state, one of the two logits is far above zero
    await vllm.load(publish_weights(tmp_path, 1, tensors))
    with pytest.raises(WorkerTaskError, match="the model samples no tokens: 100 times"):
        await vllm.generate(make_request(PROMPTS[1]))
    assert not (await vllm.inspect()).is_busy


@pytest.mark.parametrize("lora_rank", [None, 4])
async def test_an_adapter_is_served_from_the_start(vllm, tmp_path, lora_rank):
    """It is merged into a copy of its base, or served as the learner's adapters are."""
    folder = save_adapter(tmp_path / "adapter", save_tiny(tmp_path / "base", hidden_size=128))
    await vllm.open(folder, msgspec.structs.replace(VLLM_SETTINGS, vocab_size=300, lora_rank=lora_rank))
    expected = probe_logprobs(load_causal_lm(resolve_model(str(folder))), PROBE_IDS)
    np.testing.assert_allclose(await vllm.probe(PROBE_IDS), expected, atol=1e-4, rtol=0)
    result = await vllm.generate(make_request(PROMPTS[1]))
    assert (result.policy_version, result.policy_version_newest) == (0, 0)


async def test_new_experts_are_served(vllm, tmp_path):
    model = load_causal_lm(resolve_model(str(save_experts(tmp_path / "model", "qwen3_moe"))))
    await vllm.open(tmp_path / "model", VLLM_SETTINGS)
    for version in (0, 1, 2):
        if version:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            tensors = hub_tensors(model, file_tensors(model))
            assert await vllm.load(publish_weights(tmp_path / "weights", version, tensors)) is None
        np.testing.assert_allclose(await vllm.probe(PROBE_IDS), probe_logprobs(model, PROBE_IDS), atol=1e-4, rtol=0)


async def test_a_size_of_heads_that_vllm_lacks_is_one_line(vllm):
    """vLLM starts, and fails in the first step."""
    with pytest.raises(EngineError, match=r"^vLLM's CPU build fails on m\S*: use --engine torch \(") as refused:
        await vllm.serve(model={"head_dim": 16})
    assert "\n" not in str(refused.value)


async def test_a_cut_distribution_still_reports_the_full_softmax(vllm):
    await vllm.serve(is_truncated_sampling=True)
    model = tiny_model(**VLLM_MODEL)
    request = make_request([43], sampling=SamplingSettings(top_p=0.5), num_completions=64, max_tokens=8, eos_ids=NEVER)
    first_ids = set()
    for completion in completions_of(await vllm.generate(request)):
        assert_logprobs(model, [43], completion)
        first_ids.add(int(completion.token_ids[0]))
    with torch.no_grad():
        probabilities, order = model(torch.tensor([[43]])).logits[0, -1].softmax(-1).sort(descending=True)
    nucleus = order[: int((probabilities.cumsum(0) < 0.5).sum()) + 1].tolist()
    assert first_ids <= set(nucleus)
    assert len(first_ids) > 1


async def test_greedy_equals_transformers_generate(vllm):
    """A request at temperature 2 shares the batch."""
    await vllm.serve()
    model = tiny_model(**VLLM_MODEL)
    greedy = [make_request(p, sampling=SamplingSettings(0.0), num_completions=2, max_tokens=24) for p in PROMPTS]
    hot = make_request(PROMPTS[0], sampling=SamplingSettings(2.0), max_tokens=40)
    hotly, *results = await asyncio.gather(*map(vllm.generate, [hot, *greedy]))
    for completion in completions_of(hotly):
        assert_logprobs(model, PROMPTS[0], completion, temperature=2.0)
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )  # fmt: skip
        for completion in completions_of(result):
            assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()
            assert_logprobs(model, prompt, completion)


async def test_each_completion_has_its_own_seed_and_end(vllm):
    await vllm.serve()
    eos_ids = frozenset(range(20, 30))
    request = make_request(PROMPTS[0], max_tokens=12, seed=5, eos_ids=eos_ids, num_completions=MAX_BATCH)
    first, again = await vllm.generate(request), await vllm.generate(request)
    tokens = [completion.token_ids.tolist() for completion in completions_of(first)]
    assert tokens == [completion.token_ids.tolist() for completion in completions_of(again)]
    assert len(set(map(tuple, tokens))) > MAX_BATCH // 2
    for completion in completions_of(first):
        *before, last = completion.token_ids.tolist()
        assert not eos_ids.intersection(before)
        ended = completion.finish_reason is FinishReason.STOP
        assert (last in eos_ids, len(completion.token_ids) == 12 or ended) == (ended, True)
    assert set(first.finish_reasons) == {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_completion_ends_with_its_stop_ids(vllm):
    await vllm.serve()
    assert_stopped(await vllm.generate(make_request(PROMPTS[0], num_completions=8, stop_ids=STOP_IDS, **ENDLESS)))


async def test_a_prompt_is_cached_until_the_weights_change(vllm, tmp_path):
    await vllm.serve()
    before = (await vllm.inspect()).prompt_tokens_cached
    await vllm.generate(make_request(LONG_PROMPT, num_completions=12))
    assert (await vllm.inspect()).prompt_tokens_cached - before == 11 * 96, "whole blocks of 32"
    await vllm.generate(make_request(LONG_PROMPT, num_completions=1))
    assert (await vllm.inspect()).prompt_tokens_cached - before == 12 * 96
    await vllm.load(publish(tmp_path, 1, tiny_model(seed=1, **VLLM_MODEL)))
    await vllm.generate(make_request(LONG_PROMPT, num_completions=1))
    assert (await vllm.inspect()).prompt_tokens_cached - before == 12 * 96


async def test_a_turn_of_an_episode_finds_the_earlier_ones_in_the_cache(vllm, tmp_path):
    await vllm.serve()
    tokenizer: Any = SimpleNamespace(
        render_prompt=lambda prompt: SimpleNamespace(opening=""),
        answer_text=lambda *_, **__: "a text",
        encode_observation=lambda *_, **__: LONG_PROMPT[:60],
    )
    scorer: Any = Asks()
    item: Any = SimpleNamespace(prompt=(), ref="an item")
    sampler = Sampler(
        generate=vllm.generate,
        sampling=SamplingSettings(),
        completion_limit=lambda num_tokens: 400 - num_tokens,
        eos_ids=frozenset(range(EMBEDDING_ROWS)),  # a turn is one token
        tokenizer=tokenizer,
        scorer=scorer,
        episode=EpisodeSection(max_turns=3),
    )
    for version in (1, 2):
        before = (await vllm.inspect()).prompt_tokens_cached
        rollouts = await sampler.sample(item, LONG_PROMPT, 1)
        assert rollouts.turn_lengths == ((1, 1, 1),)
        # The prompts have 100, 161 and 222 tokens. Blocks of 32 are found.
        assert (await vllm.inspect()).prompt_tokens_cached - before == 0 + 96 + 160
        model = tiny_model(seed=version, **VLLM_MODEL)
        await vllm.load(publish(tmp_path, version, model))
    (completion,) = completions_of((await sampler.sample(item, LONG_PROMPT, 1)).result)
    tokens = completion.token_ids.tolist()
    for turn in range(3):
        prompt = [*LONG_PROMPT, *(token for own in tokens[:turn] for token in (own, *LONG_PROMPT[:60]))]
        taken = slice(turn, turn + 1)
        one = replace(completion, token_ids=completion.token_ids[taken], logprobs=completion.logprobs[taken])
        assert_logprobs(model, prompt, one)


async def test_a_completion_that_is_too_old_is_aborted_and_keeps_its_tokens(vllm, tmp_path):
    await vllm.serve()
    weights = [
        publish(tmp_path / str(version), version, tiny_model(seed=version, **VLLM_MODEL)) for version in (1, 2, 3)
    ]
    made = (await vllm.inspect()).tokens_made
    old = asyncio.create_task(vllm.generate(make_request(PROMPTS[0], **ENDLESS, num_completions=2)))
    await vllm.wait_for_tokens(made + 2 * 10)
    await vllm.load(weights[0])
    young = asyncio.create_task(vllm.generate(make_request(PROMPTS[1], **ENDLESS, num_completions=2)))
    both = await vllm.wait_for_tokens(made, num_running=4)
    await vllm.wait_for_tokens(both.tokens_made + 4 * 10)
    await vllm.load(weights[1])
    await vllm.wait_for_tokens((await vllm.inspect()).tokens_made + 4 * 2)
    assert not old.done()
    await vllm.load(weights[2])
    async with asyncio.timeout(30):
        for completion in completions_of(await old):
            assert (completion.policy_version, completion.policy_version_newest) == (0, 2)
            assert completion.finish_reason is FinishReason.ABORT
            assert 20 < len(completion.token_ids) < 400
    for completion in completions_of(await young):
        assert (completion.policy_version, completion.policy_version_newest) == (1, 3)
        assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 400)


async def test_a_canceled_caller_leaves_nothing_in_the_engine(vllm):
    await vllm.serve()
    made = (await vllm.inspect()).tokens_made
    running, waiting = (
        asyncio.create_task(vllm.generate(make_request(prompt, **ENDLESS, num_completions=MAX_BATCH)))
        for prompt in PROMPTS[:2]
    )
    state = await vllm.wait_for_tokens(made + 40)
    assert (state.num_running, state.num_waiting, state.num_scheduled) == (MAX_BATCH, 1, MAX_BATCH)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)

    async def is_idle():
        return not (await vllm.inspect()).is_busy

    await eventually(is_idle)
    assert (await vllm.inspect()).tokens_made < made + MAX_BATCH * 400
    assert len(completions_of(await vllm.generate(make_request(PROMPTS[2])))) == 4


async def test_invalid_weights_and_requests_change_nothing(vllm, tmp_path):
    await vllm.serve()
    before = await vllm.probe(PROBE_IDS)
    weights = publish(tmp_path, 1, tiny_model(seed=1, **VLLM_MODEL))
    damage(Path(weights.path), "shape")
    with pytest.raises(ModelError, match="another shape"):
        await vllm.load(weights)
    assert await vllm.probe(PROBE_IDS) == before
    requests = [make_request([1, 2]), make_request([1] * 500), make_request([1, EMBEDDING_ROWS])]
    result, too_long, foreign = await asyncio.gather(*map(vllm.generate, requests), return_exceptions=True)
    assert result.policy_version == 0
    assert "ValueError: 500 + 16 tokens: the engine takes 512" in str(too_long)
    assert "ValueError: the prompt has an id outside the vocabulary" in str(foreign)


async def test_a_failure_of_the_driver_ends_every_request(vllm):
    await vllm.serve()
    made = (await vllm.inspect()).tokens_made
    requests = [make_request(prompt, **ENDLESS, num_completions=MAX_BATCH) for prompt in PROMPTS[:2]]
    tasks = [asyncio.create_task(vllm.generate(request)) for request in requests]
    await vllm.wait_for_tokens(made + 8)
    async with asyncio.timeout(30):
        assert await vllm.break_driver() == "failed in vLLM: RuntimeError: out of order"
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerTaskError] * 2
        with pytest.raises(WorkerTaskError, match="closed, or failed"):
            await vllm.generate(make_request(PROMPTS[0]))
        with pytest.raises(WorkerTaskError, match="closed, or failed"):
            await vllm.probe(PROBE_IDS)


async def test_an_unknown_option_is_named_in_one_line(vllm):
    with pytest.raises(ConfigError, match="generation.engine_options.*'max_modle_len'") as caught:
        await vllm.serve(options={"max_modle_len": 64})
    assert "\n" not in str(caught.value)
