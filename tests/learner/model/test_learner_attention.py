"""Attention over packed texts equals attention over the whole row with a mask, in values and gradients."""

import pytest
import torch

from ftis_node.learner.model import attention
from ftis_node.learner.model.attention import AttentionPlan, attend, merged_classes

PROMPT, LONG_PROMPT, SHORT_PROMPT = range(0, 30), range(178, 268), range(270, 273)
# A prompt with a long completion, a single text, a long prompt, a short one, and another single text.
TEXTS = [
    *((PROMPT, range(30, 31)), (PROMPT, range(31, 131)), (PROMPT, range(131, 138))),
    *((range(138, 178),), (LONG_PROMPT, range(268, 270)), (SHORT_PROMPT, range(273, 277))),
    *((SHORT_PROMPT, range(277, 278)), (SHORT_PROMPT, range(278, 283)), (range(283, 285),)),
]
SIZE = 285


def attention_mask(window=SIZE):
    """Return the attention mask `[T, T]`, bool, set pair by pair. A token sees `window` tokens of its text."""
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    for text in TEXTS:
        places = [place for span in text for place in range(span.start, span.stop)]
        for number, place in enumerate(places):
            matrix[place, places[max(0, number + 1 - window) : number + 1]] = True
    return matrix


def inputs(dtype, *, heads=4, key_heads=2, size=16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, SIZE, size), (1, key_heads, SIZE, size), (1, key_heads, SIZE, size), (1, heads, SIZE, size))
    *tensors, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in tensors], gradient


def reference(tensors, gradient, scale, *, window=SIZE, soft_cap=None):
    query, key, value = tensors
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    output = scores.masked_fill(~attention_mask(window), -torch.inf).softmax(-1) @ value
    return output, torch.autograd.grad(output, tensors, gradient)


def packed(tensors, scale, *, device="cpu", **terms):
    plan = AttentionPlan.of(TEXTS, torch.device(device))
    output, _ = attend(None, *tensors, None, scaling=scale, plan=plan, **terms)
    return output.transpose(1, 2)


def check_equal(output, tensors, gradient, **terms):
    expected, expected_gradients = reference(tensors, gradient, 0.3, **terms)
    assert (output - expected).abs().max() < 1e-12
    for one, other in zip(torch.autograd.grad(output, tensors, gradient), expected_gradients, strict=True):
        assert (one - other).norm() < 1e-12 * other.norm()


@pytest.mark.parametrize("key_heads", [1, 4])
def test_packed_attention_equals_masked_attention(key_heads):
    tensors, gradient = inputs(torch.float64, key_heads=key_heads)
    check_equal(packed(tensors, 0.3), tensors, gradient)


@pytest.mark.parametrize("max_scores", [attention.MAX_SCORES, 1])
@pytest.mark.parametrize(("window", "soft_cap"), [(16, None), (2, None), (SIZE, 2.0), (16, 2.0)])
def test_windows_and_soft_caps_equal_masked_attention(window, soft_cap, max_scores, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    tensors, gradient = inputs(torch.float64)
    output = packed(tensors, 0.3, sliding_window=window, softcap=soft_cap)
    check_equal(output, tensors, gradient, window=window, soft_cap=soft_cap)


def test_texts_of_similar_length_share_a_call_and_each_token_has_one_output():
    plan = AttentionPlan.of(TEXTS, torch.device("cpu"))
    assert plan.buckets == ((1, 31), (1, 130), (2, 40), (1, 92), (4, 8))
    assert len(plan.rows) == 31 + 130 + 2 * 40 + 92 + 4 * 8
    assert plan.rows[plan.source].tolist() == list(range(SIZE))


def test_a_fixed_cost_merges_similar_lengths_and_bounds_the_padding():
    lengths = [*range(84, 545, 10)]
    alone, merged = merged_classes(lengths, 0), merged_classes(lengths, 1 << 20)
    assert all(name == bucket for name, bucket in alone.items())
    assert (len(alone), len(set(merged.values()))) == (12, 5)
    assert merged_classes([100, 100, 200], 1 << 20) == {112: 112, 224: 224}, "600 columns for 400 tokens"
    assert merged_classes([7000, 8000], 1 << 20) == {7168: 7168, 8192: 8192}, "15 million pairs to save one"


def test_merged_buckets_equal_masked_attention(monkeypatch):
    monkeypatch.setitem(attention.BUCKET_PAIRS, "cpu", attention.BUCKET_PAIRS["cuda"])
    assert AttentionPlan.of(TEXTS, torch.device("cpu")).buckets == ((3, 40), (2, 130), (4, 8))
    test_packed_attention_equals_masked_attention(key_heads=2)


def test_a_single_text_is_not_gathered():
    assert AttentionPlan.of([(range(0, 30),)], torch.device("cpu")).buckets == ()


def check_half_precision(output, tensors, gradient):
    """Compare output and gradients with those of float64."""
    exact_tensors = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    exact, exact_gradients = reference(exact_tensors, gradient.cpu().double(), 0.3)
    assert (output.cpu() - exact).norm() < 0.01 * exact.norm()
    for one, other in zip(torch.autograd.grad(output, tensors, gradient), exact_gradients, strict=True):
        assert (one.cpu() - other).norm() < 0.01 * other.norm()


def test_large_scores_do_not_overflow():
    tensors, _ = inputs(torch.float32)
    output = packed(tensors, 50.0)
    expected, _ = reference(tensors, torch.zeros_like(output), 50.0)
    assert torch.isfinite(output).all()
    assert (output - expected).abs().max() < 1e-4


def test_attention_on_a_gpu_equals_masked_attention():
    tensors, gradient = inputs(torch.bfloat16)
    on_gpu = [tensor.detach().to("cuda").requires_grad_() for tensor in tensors]
    check_half_precision(packed(on_gpu, 0.3, device="cuda"), on_gpu, gradient.to("cuda"))
