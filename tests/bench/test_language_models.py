"""The models of `make results-llm`: layers are cut out whole, and only right answers are trained on."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ftis_node.tasks import load_task
from results import language_models
from results.language_models import IGNORED, batch, cut, train
from tests.models.tiny_models import make_tokenizer


def make_model(num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(make_tokenizer()), num_hidden_layers=num_layers, **sizes))


def test_a_cut_model_has_the_layers_before_and_after_the_cut():
    whole = make_model(21)
    shorter = copy.deepcopy(whole)
    cut(shorter)
    kept = [*range(10), 20]
    assert shorter.config.num_hidden_layers == len(kept)
    for index, layer in zip(kept, shorter.model.layers, strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, whole.model.layers[index].mlp.up_proj.weight)
    generated = shorter.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)  # each layer has a cache
    assert shorter(generated).logits.isfinite().all()


def test_only_right_answers_have_a_loss_and_training_lowers_it(monkeypatch):
    task, tokenizer, model = load_task("words:2"), make_tokenizer(), make_model(1)
    token_ids, labels = batch([task[index] for index in range(3)], tokenizer)
    for index, (ids, row) in enumerate(zip(token_ids, labels, strict=True)):
        answer = tokenizer.decode(ids[row != IGNORED], skip_special_tokens=True)
        assert answer == f"The answer is {task[index].answer}."
    monkeypatch.setattr(language_models, "LEARNING_RATE", 3e-3)  # for a model so small
    losses = train(model, tokenizer, updates=12, seed=0)
    assert losses[-1] < 0.9 * losses[0]
