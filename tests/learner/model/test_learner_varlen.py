"""Attention by the kernel for texts of different lengths: values, gradients, and one graph for a compiled layer.

The kernel is CUDA's. Here a naive function takes its place on the CPU, below torch's own operation.
"""

from itertools import pairwise

import pytest
import torch
from learner_rig import random_groups
from test_learner_attention import SIZE, check_equal, inputs, packed
from tiny_models import make_model

from ftis_node.learner.batch import make_batch, make_packed_micro_batches
from ftis_node.learner.model import attention, kernels, varlen
from ftis_node.learner.model.activations import decoder_layers
from ftis_node.learner.model.logprobs import completion_logprobs


def by_text(query, key, value, starts, scale, window):
    """Yield each text's columns, its queries, keys and values `[h, t, D]` with repeated keys, its weights and scale."""
    for start, end in pairwise(starts.tolist()):
        text, mask = slice(start, end), torch.ones(end - start, end - start, dtype=torch.bool).tril()
        mask = mask if window < 0 else mask.triu(-window)
        heads = [each[text].transpose(0, 1) for each in (query, key, value)]
        heads[1:] = [each.repeat_interleave(query.shape[1] // key.shape[1], dim=0) for each in heads[1:]]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = heads[0] @ heads[1].transpose(1, 2) * factor
        yield text, heads, scores.masked_fill(~mask, -torch.inf).softmax(-1), factor


def forward(query, key, value, starts, _, longest, __, *more, scale=None, window_size_left=-1, **options):
    assert longest == (starts[1:] - starts[:-1]).max()
    output = torch.empty_like(query)
    for text, (_, _, values), weights, _ in by_text(query, key, value, starts, scale, window_size_left):
        output[text] = (weights @ values).transpose(0, 1)
    log_sums, empty = torch.zeros(query.shape[1], len(query)), torch.zeros(0)
    return output, log_sums, torch.zeros(2, dtype=torch.uint64), empty, empty


def backward(gradient, query, key, value, out, log_sums, starts, *more, scale=None, window_size_left=-1, **options):
    found = [torch.zeros_like(each) for each in (query, key, value)]
    for text, (queries, keys, values), weights, factor in by_text(query, key, value, starts, scale, window_size_left):
        given = gradient[text].transpose(0, 1)
        slopes = given @ values.transpose(1, 2)
        slopes = weights * (slopes - (slopes * weights).sum(-1, keepdim=True)) * factor
        parts = (slopes @ keys, slopes.transpose(1, 2) @ queries, weights.transpose(1, 2) @ given)
        for total, part in zip(found, parts, strict=True):
            total[text] = part.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(found)


@pytest.fixture(scope="module")
def kernel():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def available(kernel, monkeypatch):
    monkeypatch.setattr(varlen, "is_available", lambda device: True)
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32, torch.float64))


@pytest.mark.parametrize("window", [None, 16, 2])
def test_texts_equal_masked_attention(window):
    tensors, gradient = inputs(torch.float64)
    check_equal(packed(tensors, 0.3, sliding_window=window), tensors, gradient, window=window or SIZE)


def test_the_gradient_of_a_shared_prompt_is_rounded_once():
    """Twelve copies of a prompt, added in bfloat16 one by one, would be off by several units in the last place."""
    texts = [torch.cat([torch.arange(40), torch.arange(40 + number, 41 + number)]).numpy() for number in range(12)]
    columns = varlen.TextColumns.of(texts, torch.device("cpu"))
    tensor = torch.randn(52, 2, 8).bfloat16().requires_grad_()
    gradient = torch.randn(len(columns.rows), 2, 8).bfloat16()
    exact = torch.zeros(52, 2, 8, dtype=torch.float64).index_add(0, columns.rows, gradient.double())
    (found,) = torch.autograd.grad(varlen.Gather.apply(tensor, *columns[:2], *columns[3:6]), tensor, gradient)
    assert torch.equal(found, exact.bfloat16())
    one_by_one = sum(gradient[41 * number : 41 * number + 40] for number in range(12))
    assert not torch.equal(one_by_one, exact[:40].bfloat16())


def test_the_trial_accepts_the_kernel_and_notices_a_wrong_one(monkeypatch):
    monkeypatch.setattr(varlen, "DTYPES", (torch.bfloat16,))
    assert varlen._trial_error(torch.device("cpu")) < varlen.TOLERANCE
    attend = varlen.TextColumns.attend
    monkeypatch.setattr(
        varlen.TextColumns, "attend", lambda self, *tensors, scale, window: attend(self, *tensors, scale=0.5, window=3)
    )
    assert varlen._trial_error(torch.device("cpu")) > varlen.TOLERANCE


def arguments_of_a_layer(model, micro_batch):
    """Return the first layer and the arguments with which the model calls it."""
    calls, layer = [], decoder_layers(model)[0]
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    completion_logprobs(model, micro_batch)
    hook.remove()
    return layer, *calls[0]


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_is_one_graph_for_all_micro_batches():
    attention.register()
    model = make_model(seed=1)
    model.set_attn_implementation(attention.ATTENTION)
    batches = [make_batch(random_groups(num_groups=4, max_length=length, seed=length)) for length in (33, 20)]
    micro_batches = [make_packed_micro_batches(batch, max_tokens=10_000)[0] for batch in batches]
    layer, args, kwargs = arguments_of_a_layer(model, micro_batches[0])
    torch._dynamo.reset()
    found = torch._dynamo.explain(layer.forward)(*args, **kwargs)
    assert (found.graph_count, found.graph_break_count) == (1, 0)

    def gradients(micro_batches):
        results = []
        for micro_batch in micro_batches:
            values = completion_logprobs(model, micro_batch)
            results += [values, *torch.autograd.grad(values.mean(), list(model.parameters()))]
        return results

    expected = gradients(micro_batches)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    undo = kernels.compile_layers(model, backend="aot_eager")
    gradients(micro_batches[:1])
    seen = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = gradients(micro_batches)
    undo()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == seen > 0, "other texts need no compilation"
    assert not torch._dynamo.utils.counters["graph_break"]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    attention.register(torch.compiler.disable(attention.attend))
    torch._dynamo.reset()
    assert torch._dynamo.explain(layer.forward)(*args, **kwargs).graph_count > 1, "buckets divide a layer"
    attention.register()
