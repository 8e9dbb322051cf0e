"""The mixture engine against plain forward passes of every expert and the explicit formulas."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from generation_support import (
    EMBEDDING_ROWS,
    EOS_ID,
    PROMPTS,
    SETTINGS,
    VOCAB_SIZE,
    completions_of,
    make_request,
    save_model,
    tiny_model,
)

from ftis_node.errors import ModelError
from ftis_node.generation.engines.mixture_engine import MixtureEngine, open_mixture
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.models import resolve_model
from ftis_node.records.group import FinishReason, SamplingSettings

GREEDY = SamplingSettings(temperature=0.0)
FIT = msgspec.structs.replace(SETTINGS, vocab_size=VOCAB_SIZE)


@pytest_asyncio.fixture
async def open_tiny():
    """`open_tiny(models, mode)` opens an engine that is closed when the test ends."""
    opened: list[MixtureEngine] = []

    def open_one(models, how, **changed):
        opened.append(MixtureEngine(models, msgspec.structs.replace(SETTINGS, **changed), how))
        return opened[-1]

    yield open_one
    for engine in opened:
        await engine.close()


def three_experts() -> list[Any]:
    """Return models of different size, so peaked that a few tokens distinguish them."""
    return [tiny_model(seed=seed, num_layers=seed + 1, head_dim=16 * (1 + seed % 2)) for seed in range(3)]


def expected_mixtures(
    models: list[Any], text: list[int], *, learns: bool = True, num_ids: int = EMBEDDING_ROWS, num_unread: int = 0
) -> np.ndarray[Any, Any]:
    """Return probabilities `[T, V]` after each token of `text`, by forward passes, products and sums.

    The first `num_unread` tokens are no evidence.
    """
    probabilities = []
    for model in models:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :, :num_ids]
        probabilities.append(torch.softmax(logits.double(), dim=-1).numpy())
    weights, mixtures = np.ones(len(models)) / len(models), []
    for place, following in enumerate([*text[1:], None]):
        mixtures.append(sum(weight * each[place] for weight, each in zip(weights, probabilities, strict=True)))
        if learns and following is not None and place + 1 >= num_unread:
            weights = weights * np.array([each[place][following] for each in probabilities])
            weights = weights / weights.sum()
    return np.array(mixtures)


def expected_logprobs(
    models: list[Any], text: list[int], *, temperature: float = 1.0, **options: Any
) -> np.ndarray[Any, Any]:
    """Return log-probs of `text[1:]` under the mixture."""
    mixtures = expected_mixtures(models, text, **options)[:-1] ** (1 / temperature)
    return np.log(mixtures[range(len(text) - 1), text[1:]] / mixtures.sum(axis=1))


@pytest.mark.parametrize(("mode", "temperature"), [("posterior", 1.0), ("mean", 0.5)])
async def test_log_probs_are_those_of_the_mixture(open_tiny, mode, temperature):
    """Prompts of different length share a batch too small for them: evidence is trimmed and joined with the rows."""
    models = three_experts()
    engine = open_tiny(models, mode, max_batch=30)
    sampling = SamplingSettings(temperature=temperature)
    requests = [
        make_request(prompt, max_tokens=4 + 7 * n, num_completions=3 + n, sampling=sampling)
        for n, prompt in enumerate(PROMPTS)
    ]
    results = await asyncio.gather(*map(engine.generate, requests))
    lengths, farthest = set(), 0.0
    for request, result in zip(requests, results, strict=True):
        for completion in completions_of(result):
            text = [*request.prompt_ids, *completion.token_ids.tolist()]
            of_posterior, of_prior = (
                expected_logprobs(models, text, learns=learns, temperature=temperature)[len(request.prompt_ids) - 1 :]
                for learns in (True, False)
            )
            expected = of_posterior if mode == "posterior" else of_prior
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
            lengths.add(len(completion.token_ids))
            farthest = max(farthest, np.abs(of_posterior - of_prior).max())
    assert len(lengths) > 3
    assert farthest > 0.5, "a posterior and a prior cannot be distinguished"


async def test_an_unread_prompt_is_no_evidence(open_tiny):
    """Prompts of different length share a batch; the expected products and sums omit the prompt."""
    models = three_experts()
    engine = open_tiny(models, "answer", max_batch=12)
    requests = [make_request(prompt, max_tokens=9, num_completions=4) for prompt in PROMPTS]
    results = await asyncio.gather(*map(engine.generate, requests))
    farthest = 0.0
    for request, result in zip(requests, results, strict=True):
        num_unread = len(request.prompt_ids)
        for completion in completions_of(result):
            text = [*request.prompt_ids, *completion.token_ids.tolist()]
            found = {
                unread: expected_mixtures(models, text, num_unread=unread)[
                    range(num_unread - 1, len(text) - 1), text[num_unread:]
                ]
                for unread in (num_unread, 0)
            }
            np.testing.assert_allclose(completion.logprobs, np.log(found[num_unread]), atol=2e-5, rtol=0)
            farthest = max(farthest, np.abs(np.log(found[num_unread] / found[0])).max())
    assert farthest > 0.5, "reading the prompt makes no difference"


async def test_a_mixture_of_one_equals_the_torch_engine(open_tiny):
    model = tiny_model(seed=3)
    plain = TorchEngine(model, SETTINGS)
    mixture = open_tiny([model], "posterior")
    try:
        for sampling in (GREEDY, SamplingSettings(), SamplingSettings(temperature=0.7, top_p=0.9)):
            requests = [make_request(prompt, sampling=sampling, max_tokens=20) for prompt in PROMPTS]
            alone = await asyncio.gather(*map(plain.generate, requests))
            mixed = await asyncio.gather(*map(mixture.generate, requests))
            for one, other in zip(alone, mixed, strict=True):
                for mine, theirs in zip(completions_of(one), completions_of(other), strict=True):
                    assert mine.token_ids.tolist() == theirs.token_ids.tolist()
                    assert mine.logprobs.tolist() == theirs.logprobs.tolist()
    finally:
        await plain.close()


async def test_padded_rows_of_different_numbers_are_cut(tmp_path):
    """Both models fit the tokenizer. One is padded to 96 rows, which are likely, the other to 128."""
    wide = tiny_model(seed=1)
    wide.resize_token_embeddings(128, mean_resizing=False)
    narrow = tiny_model(seed=0, tied=False, padded_rows_are_likely=True)
    engine = MixtureEngine([narrow, wide], FIT, "posterior")
    try:
        result = await engine.generate(make_request(PROMPTS[0], num_completions=16, max_tokens=20))
    finally:
        await engine.close()
    for completion in completions_of(result):
        assert completion.finish_reason is not FinishReason.ABORT
        text = [*PROMPTS[0], *completion.token_ids.tolist()]
        expected = expected_logprobs([narrow, wide], text, num_ids=VOCAB_SIZE)
        np.testing.assert_allclose(completion.logprobs, expected[len(PROMPTS[0]) - 1 :], atol=2e-5)


async def test_models_of_different_size_are_opened_from_folders(tmp_path):
    sources = [
        resolve_model(str(save_model(tmp_path / name, seed=seed, num_layers=seed)))
        for name, seed in (("a", 1), ("b", 2))
    ]
    progress: list[str] = []
    engine = open_mixture(sources, FIT, "posterior", on_progress=lambda _, what: progress.append(what))
    try:
        result = await engine.generate(make_request(PROMPTS[0], num_completions=2, eos_ids=frozenset({EOS_ID})))
    finally:
        await engine.close()
    assert len(result.tokens) == 2
    assert progress == ["loading a into the mixture", "loading b into the mixture"]
    too_many = msgspec.structs.replace(FIT, vocab_size=EMBEDDING_ROWS + 1)
    with pytest.raises(ModelError, match="a has 96 embeddings for the 97 ids"):
        open_mixture(sources, too_many, "posterior")
