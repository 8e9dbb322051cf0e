"""The shape of a model by its configuration: published models, a model on disk, and invalid configurations."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ModelError
from ftis_node.learner.model.lora import add_adapter
from ftis_node.models import ModelSource, read_shape, shape_of
from tests.models.tiny_models import make_model, save_tiny

QWEN_05B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_3B: dict[str, Any] = QWEN_05B | {
    "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008,
}  # fmt: skip


@pytest.mark.parametrize(("config", "num_parameters"), [(QWEN_05B, 494_032_768), (QWEN_3B, 3_085_938_688)])
def test_published_models_have_their_published_number_of_parameters(config, num_parameters):
    assert shape_of(config).num_parameters == num_parameters


def test_an_untied_head_and_missing_biases_are_counted():
    config = QWEN_05B | {"model_type": "llama", "tie_word_embeddings": False}
    biases, head = 24 * (896 + 2 * 128), 151936 * 896
    assert shape_of(config).num_parameters == 494_032_768 + head - biases


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_of_a_model_on_disk_are_counted(tmp_path, tied):
    folder = save_tiny(tmp_path / "tiny", tied=tied)
    shape = read_shape(ModelSource(name="tiny", folder=folder))
    assert shape.is_tied is tied
    assert shape.num_parameters == sum(value.numel() for value in make_model(tied=tied).parameters())
    assert shape == replace(shape_of(json.loads((folder / "config.json").read_text())), stored_as="F32")


def test_an_adapter_has_the_size_that_peft_gives_it():
    model = make_model()
    shape = shape_of(model.config.to_dict())
    model.requires_grad_(False)
    add_adapter(model, LoraSection(rank=6, alpha=6))
    assert shape.adapter_parameters(6) == sum(value.numel() for value in model.parameters() if value.requires_grad)


def test_sizes_may_be_in_a_nested_table_and_heads_may_be_implied():
    left = {key: value for key, value in QWEN_05B.items() if key != "num_key_value_heads"}
    shape = shape_of({"model_type": "some_vl", "text_config": left | {"head_dim": 32}})
    assert (shape.hidden_size, shape.num_kv_heads, shape.kv_size) == (896, 14, 14 * 32)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "no hidden_size"), ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"), ({"num_experts": 8}, "no num_experts_per_tok"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_planned_is_an_error_of_one_line(changes, complaint):
    with pytest.raises(ModelError, match=complaint) as caught:
        shape_of(QWEN_05B | changes, where="DIR/config.json")
    assert str(caught.value).startswith("DIR/config.json")
    assert "\n" not in str(caught.value)
