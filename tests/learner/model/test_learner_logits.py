"""Log-probs of models that process their logits equal those of the models' own logits, in values and gradients."""

import pytest
import torch
import transformers
from learner_rig import random_groups

from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.model.logprobs import completion_logprobs

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}
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
