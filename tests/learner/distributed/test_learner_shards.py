"""The shards of two ranks equal the model that rank 0 reads."""

import pytest
import torch
from learner_rig import LORA, make_boot
from test_learner_ranks import LIMIT_S, run_two_ranks
from tiny_models import EMBEDDING_ROWS, make_tokenizer, save_tiny
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis_node.models import ModelSource, load_causal_lm
from ftis_node.models.loading import empty_causal_lm


@pytest.mark.timeout(LIMIT_S)
def test_the_shards_of_each_rank_are_those_of_the_model(tmp_path):
    untied, tied = save_tiny(tmp_path / "untied", tied=False, dtype="bfloat16"), save_tiny(tmp_path / "tied")
    odd = save_odd(tmp_path / "odd")
    boots = [
        make_boot(odd, tmp_path / "0", num_processes=2),
        make_boot(odd, tmp_path / "1", num_processes=2, lora=LORA, seed=9),
        make_boot(untied, tmp_path / "2", num_processes=2, dtype="bfloat16"),
        make_boot(tied, tmp_path / "3", num_processes=2, run_id="packing-fails"),
    ]
    loaded = run_two_ranks(boots, tmp_path, "shards_program.py")
    assert [opened["different"] for opened in loaded] == [[]] * len(boots)
    assert [opened["packs"] for opened in loaded] == [True, True, True, False], "the last one is loaded again"
    assert [opened["tied"] for opened in loaded] == [True, True, False, True]


def save_odd(folder):
    """Save a random model with tied embeddings, whose rows cannot be halved."""
    config = Qwen2Config(
        vocab_size=EMBEDDING_ROWS + 1, hidden_size=64, intermediate_size=75, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_model_has_all_but_its_weights(tmp_path, dtype):
    source = ModelSource("tiny", save_tiny(tmp_path, dtype="float32"))
    empty, loaded = empty_causal_lm(source, dtype=getattr(torch, dtype)), load_causal_lm(source, dtype=dtype)
    assert all(value.is_meta for value in empty.parameters())
    shapes = [
        {name: (value.shape, value.dtype) for name, value in model.named_parameters()} for model in (empty, loaded)
    ]
    assert shapes[0] == shapes[1]
    buffers = dict(loaded.named_buffers())
    assert buffers.keys() == dict(empty.named_buffers()).keys() != set()
    for name, value in empty.named_buffers():
        assert torch.equal(value, buffers[name]) and value.dtype == buffers[name].dtype
    assert empty.get_output_embeddings().weight is empty.get_input_embeddings().weight
    assert empty.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert empty.config._attn_implementation == "sdpa"
    assert not empty.training
