"""The choice of a token, on distributions checked by hand; after a transfer, the version that sampled it."""

import asyncio
import math

import numpy as np
import pytest
import torch
from generation_support import CLOSE, SETTINGS, completions_of, file_tensors, fresh_logprobs, make_request, tiny_model

from ftis_node.generation.engines.decode_loop import RowSettings, choose_tokens, draw, keep_likely
from ftis_node.generation.engines.torch_engine import TorchEngine
from ftis_node.records.group import SamplingSettings
from ftis_node.workers.shared_tensors import Exporter
from tests import cpu_sharing
from tests.waiting import eventually

PROMPT = [3, 1, 4]
CPU = torch.device("cpu")
PROBABILITIES = torch.tensor([0.5, 0.125, 0.25, 0.125])


def settings(*each: SamplingSettings) -> RowSettings:
    return RowSettings.of(each, CPU)


def test_a_draw_is_the_inverse_of_the_running_sum():
    uniforms = torch.tensor([0.0, 0.49, 0.5, 0.62, 0.63, 0.87, 0.88, 0.999], dtype=torch.float64)
    assert draw(PROBABILITIES.expand(8, 4), uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_id_of_probability_zero_is_never_drawn():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    uniforms = torch.tensor([0.0, 0.499999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities.expand(4, 5), uniforms).tolist() == [1, 1, 3, 3]


def test_ids_below_the_rounding_of_float32_are_drawn():
    """In float32, a sum of 1 would lose each of these ids."""
    tail = 2.0**-32
    probabilities = torch.tensor([[1.0] + [tail] * 8])
    expected = torch.arange(1, 9)
    uniforms = (1.0 + (expected.double() - 0.5) * tail) / (1.0 + 8 * tail)
    assert draw(probabilities.expand(8, 9), uniforms).tolist() == expected.tolist()


def test_tokens_are_drawn_from_the_cut_distribution():
    logits = PROBABILITIES.log().expand(3, 4)
    rows = settings(SamplingSettings(), SamplingSettings(top_k=1), SamplingSettings(top_p=0.7))
    ids, _ = choose_tokens(logits, rows, torch.full((3,), 0.95, dtype=torch.float64), num_ids=4)
    assert ids.tolist() == [3, 0, 2]


def test_log_probs_are_of_the_full_softmax_at_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(3, 4)
    rows = settings(
        SamplingSettings(temperature=2.0), SamplingSettings(temperature=0.0), SamplingSettings(temperature=1.0, top_k=1)
    )
    ids, logprobs = choose_tokens(logits, rows, torch.full((3,), 0.3, dtype=torch.float64), num_ids=4)
    assert ids.tolist() == [0, 0, 0]
    full_at_2 = 1.0 - math.log(sum(math.exp(x / 2) for x in (2, 1, 0, -1)))
    full_at_1 = 2.0 - math.log(sum(math.exp(x) for x in (2, 1, 0, -1)))
    assert logprobs.tolist() == pytest.approx([full_at_2, full_at_1, full_at_1], abs=1e-6)


def test_ids_beyond_the_limit_are_not_chosen_but_stay_in_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 5.0]]).expand(2, 3)
    rows = settings(SamplingSettings(), SamplingSettings(temperature=0.0))
    ids, logprobs = choose_tokens(logits, rows, torch.full((2,), 0.99, dtype=torch.float64), num_ids=2)
    assert ids.tolist() == [1, 1]
    assert logprobs.tolist() == pytest.approx([1 - math.log(1 + math.e + math.exp(5))] * 2, abs=1e-5)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [0.5, 0.125, 0.25, 0.125]),
        (1.0, 2, [0.5, 0.0, 0.25, 0.0]),
        (0.51, 0, [0.5, 0.0, 0.25, 0.0]),
        (0.7, 2, [0.5, 0.0, 0.25, 0.0]),  # 0.5 is two thirds of the sum after top_k: below 0.7
        (0.6, 2, [0.5, 0.0, 0.0, 0.0]),
        (0.0, 0, [0.5, 0.0, 0.0, 0.0]),
    ],
)
def test_top_p_and_top_k_keep_the_most_likely(top_p, top_k, kept):
    rows = settings(SamplingSettings(top_p=top_p, top_k=top_k), SamplingSettings())
    assert keep_likely(PROBABILITIES.expand(2, 4), rows).tolist() == [kept, PROBABILITIES.tolist()]


def test_rows_do_not_depend_on_each_other():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    each = [SamplingSettings(temperature=t, top_p=p, top_k=k) for t, p, k in
            [(1, 1, 0), (0.5, 0.9, 0), (0, 1, 0), (2, 1, 5), (1, 0.5, 3), (0.7, 1, 0)]]  # fmt: skip
    uniforms = torch.rand(6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    together = choose_tokens(logits, settings(*each), uniforms, num_ids=50)
    for row in range(6):
        alone = choose_tokens(logits[row : row + 1], settings(each[row]), uniforms[row : row + 1], num_ids=50)
        assert int(alone[0]) == int(together[0][row])
        assert float(alone[1]) == pytest.approx(float(together[1][row]), abs=1e-6)


async def test_completions_in_flight_keep_the_version_that_sampled_them(tmp_path, monkeypatch):
    """The torch engine finishes groups in flight before it loads weights. Waiting groups use the new ones."""
    cpu_sharing.install(monkeypatch.setattr)
    old, new = tiny_model(), tiny_model(seed=1)
    engine = TorchEngine(tiny_model(), SETTINGS)
    options = {"eos_ids": frozenset(), "num_completions": 2, "seed": None}
    early = [
        asyncio.create_task(engine.generate(make_request(PROMPT, max_tokens=length, **options)))
        for length in (40, 64, 90)
    ]
    await eventually(lambda: engine.tokens_made > 30)
    load = asyncio.create_task(engine.load_shared(Exporter().share(file_tensors(new)), 1))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(make_request(PROMPT, max_tokens=20, **options)))
    results = await asyncio.gather(*early, late)
    await load
    assert engine.policy_version == 1
    for result, model, version in zip(results, [old, old, old, new], [0, 0, 0, 1], strict=True):
        for completion in completions_of(result):
            assert (completion.policy_version, completion.policy_version_newest) == (version, version)
            assert np.abs(completion.logprobs - fresh_logprobs(model, PROMPT, completion)).max() < CLOSE
    await engine.close()
