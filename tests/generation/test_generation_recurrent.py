"""The check of the torch engine at its start: caches of another kind, and states that do not follow their rows."""

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from ftis_node.errors import EngineError
from ftis_node.generation.engines import kv_cache, torch_engine


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
