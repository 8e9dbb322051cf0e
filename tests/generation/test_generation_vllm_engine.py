"""The real vLLM engine against plain forward passes: log-probs, versions, ends of completions, and cleanup.

All tests share one process (`generation_vllm_support`). It opens the engine again if settings or weights changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from generation_support import (
    DAMAGES,
    EMBEDDING_ROWS,
    EOS_ID,
    NEVER,
    PROMPTS,
    VOCAB_SIZE,
    completions_of,
    damage,
    file_tensors,
    fresh_logprobs,
    make_request,
    save_model,
    tiny_model,
)
from generation_vllm_support import VLLM_MODEL, VLLM_SETTINGS, RemoteEngine

from ftis_node.errors import ConfigError, ModelError, NonFiniteError, WorkerTaskError
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.records.group import Completion, FinishReason, SamplingSettings
from ftis_node.workers.hub_names import hub_tensors
from ftis_node.workers.weight_store import WeightStore, probe_logprobs, probe_token_ids, prove
from tests.models.tiny_experts import save_experts
from tests.models.tiny_models import save_adapter, save_tiny
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

LONG_PROMPT = [(7 * index + 3) % 90 for index in range(100)]  # three blocks of vLLM's cache and a few ids
PROBE_IDS = probe_token_ids(EMBEDDING_ROWS)

Serve = Callable[..., Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RemoteEngine]:
    """A process without an open engine."""
    engine = RemoteEngine(tmp_path_factory.mktemp("engine"))
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def serve(engine: RemoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`await serve(tied=..., **changed)` returns the engine with the weights of seed 0 and changed settings."""

    async def open_one(*, tied: bool = True, padded_rows_are_likely: bool = False, **changed: Any) -> RemoteEngine:
        options = {"tied": tied, "padded_rows_are_likely": padded_rows_are_likely}
        folder = tmp_path_factory.getbasetemp() / "-".join(["vllm", *(key for key, value in options.items() if value)])
        if not folder.exists():
            save_model(folder, **VLLM_MODEL, **options)
        await engine.open(folder, msgspec.structs.replace(VLLM_SETTINGS, **changed))
        return engine

    return open_one


def model_of(seed: int = 0, **options: Any) -> Any:
    """Return the served model, of transformers."""
    return tiny_model(seed=seed, **VLLM_MODEL, **options)


def assert_logprobs(model: Any, prompt: list[int], completion: Completion, *, temperature: float = 1.0) -> None:
    """Assert that log-probs are within 1e-5 of a float32 forward pass."""
    expected = fresh_logprobs(model, prompt, completion, temperature=temperature)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
async def test_log_probs_equal_a_fresh_forward_pass_before_and_after_ten_updates(
    serve: Serve, tmp_path: Path, tied: bool
) -> None:
    """The same prompts each time, in a batch too small for them: an old cache must not be used."""
    engine = await serve(tied=tied, max_batch=10)
    store = WeightStore(tmp_path)
    before = np.zeros(len(PROBE_IDS) - 1)
    for version in range(11):
        learner = model_of(seed=version, tied=tied)
        if version:
            weights = store.publish(version, file_tensors(learner))
            assert await engine.load_weights(Path(weights.path), version, checksums=weights.checksums) is None
        probed = np.array(await engine.probe(PROBE_IDS))
        np.testing.assert_allclose(probed, probe_logprobs(learner, PROBE_IDS), atol=1e-5, rtol=0)
        assert np.abs(probed - before).max() > 0.1
        before = probed
        prompts = [*PROMPTS, LONG_PROMPT]
        requests = [make_request(prompt, num_completions=2 + n, seed=None) for n, prompt in enumerate(prompts)]
        for request, result in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            assert len(result.tokens) == request.num_completions
            assert (result.policy_version, result.policy_version_newest) == (version, version)
            for completion in completions_of(result):
                assert_logprobs(learner, list(request.prompt_ids), completion)


@pytest.mark.parametrize("how", ["directly", "by vLLM's reload"])
async def test_tensors_with_other_values_are_found(serve: Serve, tmp_path: Path, how: str) -> None:
    """A direct load compares all tensors; a reload by vLLM compares those that it does not pack."""
    engine = await serve(tied=False)
    right, wrong = file_tensors(model_of(seed=1, tied=False)), {}
    if how != "directly":
        right["model.norm.weight"] = right["model.norm.weight"].bfloat16()
    for name, tensor in right.items():  # exchange two layers, and embedding and head
        others = {
            "layers.0.": "layers.1.",
            "layers.1.": "layers.0.",
            "model.embed_tokens": "lm_head",
            "lm_head": "model.embed_tokens",
        }
        part = next((part for part in others if part in name), "")
        wrong[name.replace(part, others[part]) if part else name] = tensor
    weights = WeightStore(tmp_path / "right").publish(1, right)
    assert await engine.load_weights(Path(weights.path), 1, checksums=weights.checksums) is None
    other = {name: value ^ 1 for name, value in weights.checksums.items()}
    difference = await engine.load_weights(Path(weights.path), 1, checksums=other)
    num = len(right) if how == "directly" else 21  # biases, norms and embedding; one norm was converted
    assert difference.startswith(f"holds other values than were published in {num} of {num} tensors"), difference
    path = Path(WeightStore(tmp_path / "wrong").publish(1, wrong).path)
    difference = await engine.load_weights(path, 1, checksums=weights.checksums)
    assert difference is not None
    proof = prove(model_of(seed=1, tied=False), version=1, vocab_size=EMBEDDING_ROWS)
    assert proof.rms_difference(await engine.probe(PROBE_IDS)) > PROOF_TOLERANCES["bfloat16"]


@pytest.mark.parametrize("lora_rank", [None, 4])
async def test_an_adapter_is_served_from_the_start(engine: RemoteEngine, tmp_path: Path, lora_rank: int | None) -> None:
    """It is merged into a copy of its base, or served as the learner's adapters are."""
    folder = save_adapter(tmp_path / "adapter", save_tiny(tmp_path / "base", hidden_size=128))
    await engine.open(folder, msgspec.structs.replace(VLLM_SETTINGS, vocab_size=300, lora_rank=lora_rank))
    expected = probe_logprobs(load_causal_lm(resolve_model(str(folder))), PROBE_IDS)
    np.testing.assert_allclose(await engine.probe(PROBE_IDS), expected, atol=1e-4, rtol=0)
    result = await engine.generate(make_request(PROMPTS[1]))
    assert (result.policy_version, result.policy_version_newest) == (0, 0)


async def test_new_experts_are_served(engine: RemoteEngine, tmp_path: Path) -> None:
    model = load_causal_lm(resolve_model(str(save_experts(tmp_path / "model", "qwen3_moe"))))
    await engine.open(tmp_path / "model", msgspec.structs.replace(VLLM_SETTINGS, vocab_size=EMBEDDING_ROWS))
    for version in (0, 1, 2):
        if version:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            tensors = hub_tensors(model, file_tensors(model))
            weights = WeightStore(tmp_path / "weights").publish(version, tensors)
            assert await engine.load_weights(Path(weights.path), version, checksums=weights.checksums) is None
        probed = np.array(await engine.probe(PROBE_IDS))
        np.testing.assert_allclose(probed, probe_logprobs(model, PROBE_IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_log_probs_are_at_the_sampling_temperature(serve: Serve, temperature: float) -> None:
    engine = await serve()
    result = await engine.generate(make_request(PROMPTS[1], sampling=SamplingSettings(temperature)))
    for completion in completions_of(result):
        assert_logprobs(model_of(), PROMPTS[1], completion, temperature=temperature)


async def test_a_cut_distribution_still_reports_the_full_softmax(serve: Serve) -> None:
    engine = await serve(is_cut=True)
    model = model_of()
    request = make_request([43], sampling=SamplingSettings(top_p=0.5), num_completions=64, max_tokens=8, eos_ids=NEVER)
    first_ids = set()
    for completion in completions_of(await engine.generate(request)):
        assert_logprobs(model, [43], completion)
        first_ids.add(int(completion.token_ids[0]))
    with torch.no_grad():
        probabilities, order = model(torch.tensor([[43]])).logits[0, -1].softmax(-1).sort(descending=True)
    nucleus = order[: int((probabilities.cumsum(0) < 0.5).sum()) + 1].tolist()
    assert first_ids <= set(nucleus)
    assert len(first_ids) > 1


async def test_greedy_equals_transformers_generate(serve: Serve) -> None:
    """A request at temperature 2 shares the batch."""
    engine = await serve()
    model = model_of()
    greedy = [make_request(p, sampling=SamplingSettings(0.0), num_completions=2, max_tokens=24) for p in PROMPTS]
    hot = make_request(PROMPTS[0], sampling=SamplingSettings(2.0), request_id="hot", max_tokens=40)
    _, *results = await asyncio.gather(*map(engine.generate, [hot, *greedy]))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )  # fmt: skip
        for completion in completions_of(result):
            assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()
            assert_logprobs(model, prompt, completion)


async def test_a_seed_gives_the_same_tokens_in_any_batch(serve: Serve) -> None:
    engine = await serve()
    request = make_request(PROMPTS[0], max_tokens=24, seed=5, eos_ids=NEVER)
    alone = await engine.generate(request)
    others = [make_request(p, max_tokens=9, seed=n, request_id=f"o{n}") for n, p in enumerate(PROMPTS[1:])]
    in_company, *_ = await asyncio.gather(*map(engine.generate, [request, *others]))
    other_seed = await engine.generate(msgspec.structs.replace(request, seed=60))
    without = await engine.generate(msgspec.structs.replace(request, seed=None))
    again = await engine.generate(msgspec.structs.replace(request, seed=None))
    tokens = [
        [tuple(completion.token_ids.tolist()) for completion in completions_of(result)]
        for result in (alone, in_company, other_seed, without, again)
    ]
    assert tokens[0] == tokens[1]
    different = {ids for group in tokens[1:] for ids in group}
    assert len(different) == 16


async def test_a_completion_ends_with_the_first_of_its_eos_ids_or_at_the_limit(serve: Serve) -> None:
    eos_ids = frozenset(range(20, 30))
    engine = await serve()
    request = make_request(PROMPTS[0], eos_ids=eos_ids, num_completions=32, max_tokens=6)
    reasons = set()
    for completion in completions_of(await engine.generate(request)):
        reasons.add(completion.finish_reason)
        *before, last = completion.token_ids.tolist()
        assert not eos_ids.intersection(before)
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.shape == completion.token_ids.shape
        if completion.finish_reason is FinishReason.STOP:
            assert last in eos_ids
        else:
            assert len(completion.token_ids) == 6
            assert last not in eos_ids
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("seed", [1, None])
async def test_ids_that_are_no_tokens_end_a_completion_as_aborted(serve: Serve, seed: int | None) -> None:
    """The completion ends at once: no token after such an id is computed."""
    options = {"tied": False, "padded_rows_are_likely": True}
    engine = await serve(**options, vocab_size=VOCAB_SIZE)
    request = make_request(PROMPTS[1], num_completions=64, eos_ids=NEVER, seed=seed)
    async with asyncio.timeout(30):
        completions = completions_of(await engine.generate(request))
    aborted = [c for c in completions if c.finish_reason is FinishReason.ABORT]
    assert 0 < len(aborted) < 64
    for completion in completions:
        assert completion.token_ids.size >= 1
        assert completion.token_ids.max() < VOCAB_SIZE
        assert_logprobs(model_of(**options), PROMPTS[1], completion)
    assert all(len(completion.token_ids) < 16 for completion in aborted)
    long = msgspec.structs.replace(request, max_tokens=400)
    assert max(len(completion.token_ids) for completion in completions_of(await engine.generate(long))) < 300
    assert not (await engine.inspect()).is_busy, "tokens after a padded id are computed"


async def test_a_model_that_samples_only_padded_ids_raises_an_error(serve: Serve, tmp_path: Path) -> None:
    engine = await serve(tied=False, vocab_size=VOCAB_SIZE)
    tensors = file_tensors(model_of(tied=False))
    head = tensors["lm_head.weight"].zero_()
    head[-1], head[-2] = 1e3, -1e3  # for any hidden state, one of the two logits is far above zero
    await engine.load_weights(Path(WeightStore(tmp_path).publish(1, tensors).path), 1)
    with pytest.raises(WorkerTaskError, match="the model samples no tokens: 100 times"):
        await engine.generate(make_request(PROMPTS[1]))
    assert not (await engine.inspect()).is_busy


async def test_a_prompt_is_cached_within_its_group_only(serve: Serve) -> None:
    engine = await serve()
    before = (await engine.inspect()).prompt_tokens_cached
    await engine.generate(make_request(LONG_PROMPT, num_completions=12))
    shared = (await engine.inspect()).prompt_tokens_cached - before
    assert shared == 11 * 96  # whole blocks of 32
    await engine.generate(make_request(LONG_PROMPT, num_completions=1))
    assert (await engine.inspect()).prompt_tokens_cached - before == shared


async def test_each_completion_in_flight_reports_its_own_versions(serve: Serve, tmp_path: Path) -> None:
    engine = await serve()
    path = Path(WeightStore(tmp_path).publish(1, file_tensors(model_of(seed=1))).path)
    made = (await engine.inspect()).tokens_made
    long = make_request(PROMPTS[0], max_tokens=480, eos_ids=NEVER, num_completions=2, request_id="long")
    rare = frozenset({64})  # one token in 200: some end before the update, some after it
    mixed = make_request(PROMPTS[1], max_tokens=480, eos_ids=rare, num_completions=24, request_id="mixed")
    running = [asyncio.create_task(engine.generate(request)) for request in (long, mixed)]
    await engine.wait_for_tokens(made + 26 * 80)
    await engine.load_weights(path, 1)
    across, both = await asyncio.gather(*running)
    after = await engine.generate(make_request(PROMPTS[0]))
    assert [(c.policy_version, c.policy_version_newest) for c in completions_of(across)] == [(0, 1)] * 2
    versions = {(c.policy_version, c.policy_version_newest) for c in completions_of(both)}
    assert versions == {(0, 0), (0, 1)}
    assert (after.policy_version, after.policy_version_newest) == (1, 1)
    for completion in completions_of(both):
        if completion.policy_version_newest == 0:
            assert_logprobs(model_of(), PROMPTS[1], completion)
    for completion in completions_of(after):
        assert_logprobs(model_of(seed=1), PROMPTS[0], completion)


async def test_a_completion_that_is_too_old_is_aborted_and_keeps_its_tokens(serve: Serve, tmp_path: Path) -> None:
    engine = await serve(max_version_span=2)
    store = WeightStore(tmp_path, keep=4)
    paths = [Path(store.publish(v, file_tensors(model_of(seed=v))).path) for v in (1, 2, 3)]
    made = (await engine.inspect()).tokens_made
    options = {"max_tokens": 400, "eos_ids": NEVER, "num_completions": 2}
    old = asyncio.create_task(engine.generate(make_request(PROMPTS[0], **options, request_id="old")))
    await engine.wait_for_tokens(made + 2 * 10)
    await engine.load_weights(paths[0], 1)
    young = asyncio.create_task(engine.generate(make_request(PROMPTS[1], **options, request_id="young")))
    both = await engine.wait_for_tokens(made, num_running=4)
    await engine.wait_for_tokens(both.tokens_made + 4 * 10)
    await engine.load_weights(paths[1], 2)
    await engine.wait_for_tokens((await engine.inspect()).tokens_made + 4 * 2)
    assert not old.done()
    await engine.load_weights(paths[2], 3)
    async with asyncio.timeout(30):
        cut = await old
    for completion in completions_of(cut):
        assert (completion.policy_version, completion.policy_version_newest) == (0, 2)
        assert completion.finish_reason is FinishReason.ABORT
        assert 20 < len(completion.token_ids) < 400
        first = dataclasses.replace(completion, token_ids=completion.token_ids[:10], logprobs=completion.logprobs[:10])
        assert_logprobs(model_of(), PROMPTS[0], first)
    for completion in completions_of(await young):
        assert (completion.policy_version, completion.policy_version_newest) == (1, 3)
        assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 400)


async def test_a_canceled_caller_leaves_nothing_in_the_engine(serve: Serve) -> None:
    engine = await serve(max_batch=4)
    made = (await engine.inspect()).tokens_made
    options = {"max_tokens": 400, "eos_ids": NEVER}
    running, waiting = (
        asyncio.create_task(engine.generate(make_request(p, **options, request_id=str(p)))) for p in PROMPTS[:2]
    )
    state = await engine.wait_for_tokens(made + 40)
    assert (state.num_running, state.num_waiting, state.num_scheduled) == (4, 1, 4)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)

    async def is_idle() -> bool:
        return not (await engine.inspect()).is_busy

    await eventually(is_idle)
    assert (await engine.inspect()).tokens_made < made + 1600
    assert len(completions_of(await engine.generate(make_request(PROMPTS[2])))) == 4


async def test_cancel_returns_what_was_sampled_as_aborted(serve: Serve) -> None:
    engine = await serve(max_batch=4)
    made = (await engine.inspect()).tokens_made
    options = {"max_tokens": 400, "eos_ids": NEVER}
    running = asyncio.create_task(engine.generate(make_request(PROMPTS[0], **options, request_id="running")))
    waiting = asyncio.create_task(engine.generate(make_request(PROMPTS[1], request_id="waiting")))
    await engine.wait_for_tokens(made + 40)
    await engine.cancel(["waiting", "running", "unknown"])
    completions = completions_of(await running)
    for completion in completions:
        assert completion.finish_reason is FinishReason.ABORT
        assert 8 <= len(completion.token_ids) < 400
        assert_logprobs(model_of(), PROMPTS[0], completion)
    with pytest.raises(WorkerTaskError, match="before its first token"):
        await waiting
    state = await engine.inspect()
    assert not state.is_busy


@pytest.mark.parametrize("how", DAMAGES)
async def test_invalid_weights_change_nothing(serve: Serve, tmp_path: Path, how: str) -> None:
    engine = await serve()
    before = await engine.probe(PROBE_IDS)
    path = Path(WeightStore(tmp_path).publish(1, file_tensors(model_of(seed=1))).path)
    damage(path, how)
    with pytest.raises(ModelError, match=DAMAGES[how]):
        await engine.load_weights(path, 1)
    assert await engine.probe(PROBE_IDS) == before
    assert (await engine.generate(make_request(PROMPTS[0]))).policy_version == 0


async def test_nan_weights_raise_an_error_until_new_weights_come(serve: Serve, tmp_path: Path) -> None:
    engine = await serve()
    store = WeightStore(tmp_path)
    broken = file_tensors(model_of(seed=1))
    broken["model.norm.weight"].fill_(float("nan"))
    await engine.load_weights(Path(store.publish(1, broken).path), 1)
    with pytest.raises(NonFiniteError, match="not finite"):
        await engine.generate(make_request(PROMPTS[0]))
    await engine.load_weights(Path(store.publish(2, file_tensors(model_of(seed=2))).path), 2)
    for completion in completions_of(await engine.generate(make_request(PROMPTS[0]))):
        assert_logprobs(model_of(seed=2), PROMPTS[0], completion)


async def test_an_invalid_request_fails_alone(serve: Serve) -> None:
    engine = await serve(options={"max_model_len": 64})
    result, too_long, foreign = await asyncio.gather(
        engine.generate(make_request([1, 2])),
        engine.generate(make_request([1] * 60)),
        engine.generate(make_request([1, EMBEDDING_ROWS])),
        return_exceptions=True,
    )
    assert len(result.tokens) == 4
    assert isinstance(too_long, WorkerTaskError)
    assert "ValueError: 60 + 16 tokens: the engine takes 64" in str(too_long)
    assert isinstance(foreign, WorkerTaskError)
    assert "ValueError: the prompt has an id outside the vocabulary" in str(foreign)


@pytest.mark.parametrize("option", [{"max_modle_len": 64}, {"logprobs_mode": "raw_logits"}, {"max_num_seqs": 3}])
async def test_a_wrong_option_is_named_in_one_line(serve: Serve, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"generation.engine_options.*'{next(iter(option))}'") as caught:
        await serve(options=option)
    assert "\n" not in str(caught.value)


async def test_a_failure_of_the_driver_ends_every_request(serve: Serve) -> None:
    engine = await serve(max_batch=4)
    made = (await engine.inspect()).tokens_made
    options = {"max_tokens": 400, "eos_ids": NEVER}
    tasks = [asyncio.create_task(engine.generate(make_request(p, **options, request_id=str(p)))) for p in PROMPTS[:2]]
    await engine.wait_for_tokens(made + 8)
    async with asyncio.timeout(30):
        assert await engine.break_driver() == "failed in vLLM: RuntimeError: out of order"
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerTaskError] * 2
        with pytest.raises(WorkerTaskError, match="closed, or failed"):
            await engine.generate(make_request(PROMPTS[0]))
        with pytest.raises(WorkerTaskError, match="closed, or failed"):
            await engine.probe(PROBE_IDS)
