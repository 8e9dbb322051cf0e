"""Log-probs equal those of single completions and of processed logits. The full logits are never in memory."""

import pytest
import torch
import transformers
from learner_rig import flat_gradient, logprobs_by_row, random_groups
from tiny_models import EMBEDDING_ROWS, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.model import logprobs
from ftis_node.learner.model.logprobs import LogitsProcessing, completion_logprobs, head_logprobs


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request):
    return make_model(tied=request.param)


@pytest.fixture(scope="module")
def batch():
    return make_batch(random_groups(num_groups=5, group_size=4, max_length=30))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [90, 10_000])
def test_log_probs_equal_those_of_single_completions(model, batch, temperature, max_tokens):
    matrix = torch.zeros(batch.mask.shape)
    with torch.no_grad():
        for micro_batch in make_micro_batches(batch, max_tokens=max_tokens):
            values = completion_logprobs(model, micro_batch, temperature=temperature, head_chunk_tokens=7)
            matrix.view(-1)[micro_batch.cell_index] = values
        assert (matrix - logprobs_by_row(model, batch, temperature)).abs().max() < 1e-5
    assert matrix[~batch.mask].abs().max() == 0
    assert matrix[batch.mask].std() > 0.3  # equal values would not detect a permutation


def test_the_gradient_does_not_depend_on_chunks(model, batch):
    (micro_batch,) = make_micro_batches(batch, max_tokens=10_000)
    weights = torch.randn(len(micro_batch.target_ids), generator=torch.Generator().manual_seed(0))

    def gradients(chunk_tokens):
        model.zero_grad()
        (completion_logprobs(model, micro_batch, head_chunk_tokens=chunk_tokens) * weights).sum().backward()
        return flat_gradient(model)

    whole = gradients(100_000)
    assert (gradients(5) - whole).norm() < 1e-6 * whole.norm()


def test_products_into_float32_are_used_if_the_device_has_them(monkeypatch, temperature=0.7):
    """CUDA has such products, and a stub adds them on the CPU. Only scores are rounded to bfloat16."""

    def wide(product):
        def made(*tensors, out_dtype=None, out=None):
            if out_dtype is None:
                return product(*tensors)
            calls.append(out is not None)
            found = product(*(tensor.to(out_dtype) for tensor in tensors))
            return found if out is None else out.copy_(found)

        return made

    calls = []
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(60, 64, generator=generator).bfloat16().requires_grad_()
    head = torch.nn.Linear(64, 300, bias=False).bfloat16()
    ids = torch.randint(0, 300, (60,), generator=generator)

    def run():
        head.zero_grad()
        processing = LogitsProcessing(temperature=temperature)
        values = head_logprobs(head, hidden, ids, processing=processing, chunk_tokens=25)
        values.sum().backward()
        return values.detach(), head.weight.grad.float()

    exact = torch.log_softmax(hidden.double() @ head.weight.double().T / temperature, dim=-1)
    expected = exact.gather(-1, ids[:, None])[:, 0].detach()
    narrow, its_gradient = run()
    monkeypatch.setattr(logprobs, "has_wide_products", lambda device, dtype: True)
    monkeypatch.setattr(torch, "mm", wide(torch.mm))
    monkeypatch.setattr(torch, "addmm", wide(torch.addmm))
    values, gradient = run()
    assert calls == [False] * 3 + [False, True] * 3
    assert (values - expected).abs().max() < 1e-5 < (narrow - expected).abs().max()
    assert (gradient - its_gradient).norm() < 0.01 * its_gradient.norm()


class LargestLogits(TorchDispatchMode):
    """A recorder of the largest number of rows of a tensor that is as wide as the vocabulary."""

    num_rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == EMBEDDING_ROWS:
                self.num_rows = max(self.num_rows, tensor.shape[0])
        return result


def test_the_full_logits_are_never_in_memory(batch):
    model = make_model(hidden_size=32)  # with this width the gradient of the head is no larger than a chunk
    (micro_batch,) = make_micro_batches(batch, max_tokens=10_000)
    assert len(micro_batch.target_ids) > 200
    with LargestLogits() as seen:
        completion_logprobs(model, micro_batch, head_chunk_tokens=40).sum().backward()
    assert seen.num_rows == 40


SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.2,
}  # fmt: skip
PROCESSED = {  # keys of the configuration that change logits, and those that must not be applied again
    "Granite": {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "Gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0, "head_dim": 16, "sliding_window": 8},
    "Cohere": {"logit_scale": 2.0},
}


class PlainHead(torch.nn.Module):
    """A head that is not one plain matrix for the learner, with the values of one."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, hidden):
        return self.linear(hidden)


def make_processing_model(family, dtype):
    config = getattr(transformers, f"{family}Config")(**SIZES | PROCESSED[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    return model.eval()


@pytest.mark.parametrize("is_plain_head", [False, True])
@pytest.mark.parametrize("family", PROCESSED)
def test_values_and_gradients_equal_those_of_the_model_itself(family, is_plain_head):
    dtype, tolerance, temperature = torch.float64, 1e-12, 0.7
    model = make_processing_model(family, dtype)
    (micro_batch,) = make_micro_batches(make_batch(random_groups(num_groups=2, group_size=3)), max_tokens=10_000)
    weights = torch.randn(len(micro_batch.target_ids), generator=torch.Generator().manual_seed(0), dtype=dtype)

    logits = model(input_ids=micro_batch.token_ids).logits.flatten(0, 1)[micro_batch.predictor_index]
    expected = (logits / temperature).log_softmax(-1).gather(-1, micro_batch.target_ids[:, None])[:, 0]
    expected_gradients = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    if is_plain_head:
        model.set_output_embeddings(PlainHead(model.get_output_embeddings()))
    found = completion_logprobs(model, micro_batch, temperature=temperature, head_chunk_tokens=7)
    gradients = torch.autograd.grad((found * weights).sum(), list(model.parameters()))

    assert (found - expected).abs().max() < tolerance
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert (one - other).norm() < tolerance * (1 + other.norm())
