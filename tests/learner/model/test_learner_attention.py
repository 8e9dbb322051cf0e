"""Attention in parts is attention as a whole: values, gradients, for each kernel, with grouped queries."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ftis_node.learner.data.layout import SMALL_BLOCK, SMALL_FAMILY, Link, Span
from ftis_node.learner.model import attention_kernels
from ftis_node.learner.model.attention import AttentionPlan, PackedAttention, attend, is_flash_usable

# A long family, a text alone, two short families, and blocks on both sides of the limit for short ones.
BLOCKS = [
    *(Span(0, 30), Span(30, 31), Span(31, 131), Span(131, 138), Span(138, 178)),
    *(Span(178, 268), Span(268, 270), Span(270, 273), Span(273, 277), Span(277, 278), Span(278, 283)),
]
LINKS = [Link(Span(30, 138), Span(0, 30)), Link(Span(268, 270), Span(178, 268)), Link(Span(273, 283), Span(270, 273))]
SIZE = 283


def seen():
    """`[T, T]` bool, written down pair by pair."""
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    for block in BLOCKS:
        matrix[block.start : block.end, block.start : block.end] = True
    matrix.tril_()
    for link in LINKS:
        matrix[link.tokens.start : link.tokens.end, link.prompt.start : link.prompt.end] = True
    return matrix


def inputs(dtype, *, heads=4, key_heads=2, size=16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, SIZE, size), (1, key_heads, SIZE, size), (1, key_heads, SIZE, size), (1, heads, SIZE, size))
    *tensors, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in tensors], gradient


def reference(tensors, gradient, scale):
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=seen(), scale=scale, enable_gqa=True)
    return output, torch.autograd.grad(output, tensors, gradient)


@pytest.fixture(params=["cpu kernel", "matrix products"])
def kernel(request, monkeypatch):
    """On a GPU without fast kernels the products do all; here the CPU's own kernel does a block."""
    if request.param == "matrix products":
        attend = partial(attention_kernels._attend, is_causal=True)
        monkeypatch.setattr("ftis_node.learner.model.attention.attend_self", attend)
        backward = partial(attention_kernels._attend_backward, is_causal=True)
        monkeypatch.setattr("ftis_node.learner.model.attention.attend_self_backward", backward)
        monkeypatch.setattr(attention_kernels, "MAX_SCORES", 2000)  # several chunks of queries
    return request.param


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_parts_are_the_whole(kernel, dtype, tolerance, key_heads):
    tensors, gradient = inputs(dtype, key_heads=key_heads)
    plan = AttentionPlan.of(BLOCKS, LINKS, torch.device("cpu"))
    assert plan.links == (LINKS[0],)
    assert plan.blocks == (BLOCKS[2],)
    assert [(bucket.size, bucket.mask is None) for bucket in plan.buckets] == [
        *((32, True), (1, True), (8, True), (64, True)),  # of the long family, and the text alone
        *((128, False), (16, False)),
    ]
    assert SMALL_BLOCK < len(BLOCKS[2])
    assert 92 < SMALL_FAMILY < 138
    output = PackedAttention.apply(*tensors, plan, 0.3)
    expected, expected_gradients = reference(tensors, gradient, 0.3)
    assert (output - expected).abs().max() < tolerance
    found = torch.autograd.grad(output, tensors, gradient)
    for one, other in zip(found, expected_gradients, strict=True):
        assert (one - other).norm() < tolerance * other.norm()


def test_half_precision_keeps_scores_in_float32(kernel):
    tensors, gradient = inputs(torch.bfloat16)
    plan = AttentionPlan.of(BLOCKS, LINKS, torch.device("cpu"))
    output = PackedAttention.apply(*tensors, plan, 0.3)
    exact, exact_gradients = reference(
        [tensor.detach().double().requires_grad_() for tensor in tensors], gradient.double(), 0.3
    )
    assert (output - exact).norm() < 0.01 * exact.norm()
    for one, other in zip(torch.autograd.grad(output, tensors, gradient), exact_gradients, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


def test_large_scores_do_not_overflow():
    tensors, _ = inputs(torch.float32)
    plan = AttentionPlan.of(BLOCKS, LINKS, torch.device("cpu"))
    output = PackedAttention.apply(*tensors, plan, 50.0)
    expected, _ = reference(tensors, torch.zeros_like(output), 50.0)
    assert torch.isfinite(output).all()
    assert (output - expected).abs().max() < 1e-4


def test_flash_attention_is_the_same():
    device = torch.device("cuda")
    if not is_flash_usable(device, torch.bfloat16):
        pytest.skip("this GPU is too old for FlashAttention's kernels")
    tensors, gradient = inputs(torch.bfloat16)
    exact, exact_gradients = reference(
        [tensor.detach().double().requires_grad_() for tensor in tensors], gradient.double(), 0.3
    )
    on_gpu = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
    plan = AttentionPlan.of(BLOCKS, LINKS, device, flash=True)
    output, _ = attend(None, *on_gpu, None, scaling=0.3, plan=plan)
    output = output.transpose(1, 2)
    assert (output.cpu() - exact).norm() < 0.01 * exact.norm()
    for one, other in zip(torch.autograd.grad(output, on_gpu, gradient.to(device)), exact_gradients, strict=True):
        assert (one.cpu() - other).norm() < 0.01 * other.norm()
