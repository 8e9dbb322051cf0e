"""The torch engine against plain forward passes and `generate` of transformers, and the check at its start."""

import asyncio
import math
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from generation_support import (
    DAMAGES,
    EOS_ID,
    NEVER,
    PROMPTS,
    SETTINGS,
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
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from ftis_node.errors import EngineError, ModelError, NonFiniteError, WorkerTaskError
from ftis_node.generation.engines import kv_cache, torch_engine
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.records.group import FinishReason, SamplingSettings
from ftis_node.workers.weight_store import probe_logprobs, probe_token_ids, publish_weights
from tests.waiting import eventually

GREEDY = SamplingSettings(temperature=0.0)


@pytest_asyncio.fixture
async def open_tiny():
    """`open_tiny(model, **changed)` opens an engine with changed settings. It is closed when the test ends."""
    opened: list[TorchEngine] = []

    def open_one(model, on_progress=lambda: None, **changed):
        opened.append(TorchEngine(model, msgspec.structs.replace(SETTINGS, **changed), on_progress))
        return opened[-1]

    yield open_one
    for engine in opened:
        await engine.close()


@pytest.mark.parametrize(("tied", "num_layers"), [(True, 2), (False, 4)])
async def test_log_probs_equal_a_fresh_forward_pass(open_tiny, tied, num_layers):
    """Prompts of different length share a batch too small for them: rows join and leave while others decode."""
    model = tiny_model(tied=tied, num_layers=num_layers)
    engine = open_tiny(model, max_batch=10)
    requests = [make_request(prompt, max_tokens=4 + 7 * n, num_completions=3 + n) for n, prompt in enumerate(PROMPTS)]
    results = await asyncio.gather(*map(engine.generate, requests))
    lengths = set()
    for request, result in zip(requests, results, strict=True):
        assert len(result.tokens) == request.num_completions
        for completion in completions_of(result):
            expected = fresh_logprobs(model, request.prompt_ids, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
            assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
            lengths.add(len(completion.token_ids))
    assert len(lengths) > 3
    assert engine.tokens_made >= sum(len(c.token_ids) for result in results for c in completions_of(result))


async def test_greedy_equals_transformers_generate(open_tiny):
    model = tiny_model()
    engine = open_tiny(model)
    requests = [make_request(p, sampling=GREEDY, num_completions=2, max_tokens=24) for p in PROMPTS]
    results = await asyncio.gather(*map(engine.generate, requests))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )  # fmt: skip
        for completion in completions_of(result):
            assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()
            np.testing.assert_allclose(completion.logprobs, fresh_logprobs(model, prompt, completion), atol=1e-5)


async def test_a_completion_ends_with_the_first_of_its_eos_ids_or_at_the_limit(open_tiny):
    eos_ids = frozenset(range(20, 40))
    request = make_request(PROMPTS[0], eos_ids=eos_ids, num_completions=32, max_tokens=6)
    reasons = set()
    for completion in completions_of(await open_tiny(tiny_model()).generate(request)):
        reasons.add(completion.finish_reason)
        *before, last = completion.token_ids.tolist()
        assert not eos_ids.intersection(before)
        if completion.finish_reason is FinishReason.STOP:
            assert last in eos_ids
        else:
            assert len(completion.token_ids) == 6
            assert last not in eos_ids
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_completion_ends_with_its_stop_ids(open_tiny):
    request = make_request(PROMPTS[0], eos_ids=NEVER, stop_ids=STOP_IDS, num_completions=8, max_tokens=400)
    assert_stopped(await open_tiny(tiny_model()).generate(request))


async def test_ids_that_are_no_tokens_end_a_completion_as_aborted(open_tiny):
    model = tiny_model(tied=False, padded_rows_are_likely=True)
    request = make_request(PROMPTS[1], num_completions=64, eos_ids=NEVER)
    completions = completions_of(await open_tiny(model, vocab_size=VOCAB_SIZE).generate(request))
    aborted = [c for c in completions if c.finish_reason is FinishReason.ABORT]
    assert 0 < len(aborted) < 64
    for completion in completions:
        assert completion.token_ids.size >= 1
        assert completion.token_ids.max() < VOCAB_SIZE
        expected = fresh_logprobs(model, PROMPTS[1], completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
    assert all(len(completion.token_ids) < 16 for completion in aborted)


async def test_a_seed_gives_the_same_tokens_in_any_batch(open_tiny):
    model = tiny_model()
    engine = open_tiny(model)
    request = make_request(PROMPTS[0], max_tokens=24, seed=5)
    alone = await engine.generate(request)
    others = [make_request(p, max_tokens=9, seed=n) for n, p in enumerate(PROMPTS[1:])]
    in_company, *_ = await asyncio.gather(*map(engine.generate, [request, *others]))
    other_seed, unseeded = [await engine.generate(msgspec.structs.replace(request, seed=seed)) for seed in (6, None)]
    tokens = [[c.token_ids.tolist() for c in completions_of(r)] for r in (alone, in_company, other_seed, unseeded)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2] != tokens[3] != tokens[0]
    assert len({tuple(ids) for ids in tokens[0]}) == 4


async def test_completions_that_end_do_not_change_the_others(open_tiny):
    """Each completion is the prefix of the one that is sampled if none ends."""
    engine = open_tiny(tiny_model())
    request = make_request(PROMPTS[0], num_completions=8, max_tokens=24, eos_ids=frozenset(range(20, 30)))
    ended = await engine.generate(request)
    endless = await engine.generate(msgspec.structs.replace(request, eos_ids=NEVER))
    assert len({len(completion.token_ids) for completion in completions_of(ended)}) > 2
    for short, long in zip(completions_of(ended), completions_of(endless), strict=True):
        assert short.token_ids.tolist() == long.token_ids[: len(short.token_ids)].tolist()


async def test_a_group_larger_than_the_batch_is_sampled(open_tiny):
    engine = open_tiny(tiny_model(), max_batch=4, max_prefill_tokens=5)
    requests = [make_request(p, num_completions=6) for n, p in enumerate(PROMPTS)]
    results = await asyncio.gather(*map(engine.generate, requests))
    assert [len(result.tokens) for result in results] == [6] * 4


async def test_the_event_loop_runs_while_the_engine_computes(open_tiny):
    progress: list[float] = []
    engine = open_tiny(tiny_model(num_layers=4), lambda: progress.append(time.monotonic()))
    generating = asyncio.create_task(
        engine.generate(make_request(PROMPTS[0], max_tokens=200, num_completions=16, eos_ids=NEVER))
    )
    num_turns = 0
    while not generating.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 20 and len(progress) >= 200 / 8


async def test_a_canceled_caller_frees_the_engine(open_tiny):
    engine = open_tiny(tiny_model())
    endless = asyncio.create_task(engine.generate(make_request(PROMPTS[0], max_tokens=100_000, eos_ids=NEVER)))
    beside = asyncio.create_task(engine.generate(make_request(PROMPTS[1], max_tokens=40, eos_ids=NEVER)))
    await eventually(lambda: engine.tokens_made >= 40)
    endless.cancel()
    assert [len(c.token_ids) for c in completions_of(await beside)] == [40] * 4
    await engine.generate(make_request(PROMPTS[3], max_tokens=1, eos_ids=NEVER))  # the engine has seen the cancellation
    made = engine.tokens_made
    await engine.generate(make_request(PROMPTS[2], max_tokens=10, eos_ids=NEVER))
    assert engine.tokens_made - made == 40, "rows of a canceled caller are still decoded"


async def test_nan_weights_raise_an_error_until_new_weights_come(open_tiny, tmp_path):
    model = tiny_model()
    published = publish_weights(tmp_path, 1, file_tensors(tiny_model(seed=1)))
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    engine = open_tiny(model)
    outcomes = await asyncio.gather(*(engine.generate(make_request(p)) for p in PROMPTS), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NonFiniteError] * 4
    await engine.load_weights(Path(published.path), 1)
    assert len(completions_of(await engine.generate(make_request(PROMPTS[0])))) == 4


@pytest.mark.parametrize(("tied", "with_head"), [(True, False), (True, True), (False, False)])
async def test_new_weights_are_served(open_tiny, tmp_path, tied, with_head):
    """The log-probs prove the weights; the version alone does not."""
    engine = open_tiny(tiny_model(tied=tied))
    probe_ids = probe_token_ids(VOCAB_SIZE)
    for version in (1, 2):
        learner = tiny_model(tied=tied, seed=version)
        before = await engine.probe(probe_ids)
        published = publish_weights(tmp_path, version, file_tensors(learner, with_head=with_head))
        await engine.load_weights(Path(published.path), version)
        assert engine.policy_version == version
        after = await engine.probe(probe_ids)
        np.testing.assert_allclose(after, probe_logprobs(learner, probe_ids), atol=1e-6)
        assert np.abs(np.array(after) - np.array(before)).max() > 0.1
        result = await engine.generate(make_request(PROMPTS[1]))
        assert (result.policy_version, result.policy_version_newest) == (version, version)
        for completion in completions_of(result):
            np.testing.assert_allclose(completion.logprobs, fresh_logprobs(learner, PROMPTS[1], completion), atol=1e-5)


@pytest.mark.parametrize("how", DAMAGES)
async def test_invalid_weights_change_nothing(open_tiny, tmp_path, how):
    engine = open_tiny(tiny_model())
    probe_ids = probe_token_ids(VOCAB_SIZE)
    before = await engine.probe(probe_ids)
    path = Path(publish_weights(tmp_path, 1, file_tensors(tiny_model(seed=1))).path)
    damage(path, how)
    with pytest.raises(ModelError, match=DAMAGES[how]):
        await engine.load_weights(path, 1)
    assert await engine.probe(probe_ids) == before and engine.policy_version == 0
    assert (await engine.generate(make_request(PROMPTS[0]))).policy_version == 0


async def test_close_ends_every_request(open_tiny):
    engine = open_tiny(tiny_model(), max_batch=4)
    tasks = [
        asyncio.create_task(engine.generate(make_request(p, max_tokens=100_000, eos_ids=NEVER))) for p in PROMPTS[:2]
    ]
    await eventually(lambda: engine.tokens_made >= 8)
    await engine.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkerTaskError] * 2


async def test_close_waits_for_one_forward_pass_at_most(open_tiny):
    model, begun, go = tiny_model(), threading.Event(), threading.Event()
    passes = 0

    def slow(*_):
        nonlocal passes
        passes += 1
        if passes == 2:
            begun.set()
            go.wait(60)

    model.register_forward_pre_hook(slow)
    engine = open_tiny(model)
    running = asyncio.create_task(engine.generate(make_request(PROMPTS[0], max_tokens=100_000, eos_ids=NEVER)))
    await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(engine.close())
    await eventually(lambda: engine._thread._shutdown)
    go.set()
    await closing
    await asyncio.gather(running, return_exceptions=True)
    assert passes == 2


@pytest.mark.parametrize("unknown_id", [-1, 96])
async def test_a_prompt_with_an_unknown_id_fails_alone(open_tiny, unknown_id):
    engine = open_tiny(tiny_model())
    requests = [make_request([1, 2]), make_request([1, unknown_id])]
    result, error = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert len(result.tokens) == 4 and isinstance(error, ValueError)


@pytest.mark.parametrize("change", [{"prompt_ids": ()}, {"num_completions": 0}, {"max_tokens": 0}])
def test_an_empty_request_is_refused(change):
    with pytest.raises(ValueError, match="at least one"):
        msgspec.structs.replace(make_request([1]), **change)


@pytest.fixture
def model():
    """Return a tiny hybrid of a convolution and an attention layer."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        initializer_range=0.3,
    )
    return Lfm2ForCausalLM(config).eval()


def test_a_hybrid_is_served(model):
    torch_engine.check_decoding(model, "m", vocab_size=90)


@pytest.mark.parametrize("operation", ["select_rows", "join"])
def test_states_that_do_not_follow_their_rows_are_found(model, monkeypatch, operation):
    plain = getattr(kv_cache, operation)

    def without_states(cache, *arguments):
        mask = plain(cache, *arguments)
        for states in kv_cache._states(cache.layers[0]):
            states |= {number: torch.zeros_like(state) for number, state in kv_cache._present(states)}
        return mask

    monkeypatch.setattr(f"ftis_node.generation.engines.decode_loop.{operation}", without_states)
    with pytest.raises(EngineError, match="^the torch engine cannot serve m: its decoded log-probs are off by "):
        torch_engine.check_decoding(model, "m", vocab_size=90)


def test_a_cache_of_another_kind_is_refused(model, monkeypatch):
    class FooLayer(DynamicLayer): ...

    cache = DynamicCache(config=model.config)
    cache.layers[1] = FooLayer()
    monkeypatch.setattr(kv_cache, "DynamicCache", lambda config: cache)
    with pytest.raises(EngineError, match="^the torch engine cannot serve m: its cache has a FooLayer$"):
        torch_engine.check_decoding(model, "m", vocab_size=90)
