"""Each of two ranks loads only its rows of a model, and they equal those of the files."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from learner_rig import make_boot
from safetensors.torch import load_file, save_file
from test_learner_ranks import LIMIT_S, run_two_ranks
from tiny_models import EMBEDDING_ROWS, make_tokenizer, save_tiny
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis_node.config.workers import LoraSection
from ftis_node.models import ModelSource, load_causal_lm
from ftis_node.models.loading import WeightRows, empty_causal_lm

LORA = LoraSection(rank=4, alpha=8)


def save_shape(folder, **sizes):
    """Save a random model of this shape in several files, with tied embeddings."""
    config = Qwen2Config(
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, eos_token_id=2, **sizes,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder, max_shard_size="60MB")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_rank_loads_only_its_rows(tmp_path):
    sizes = {"vocab_size": EMBEDDING_ROWS, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    wide_folder = save_shape(tmp_path / "wide", **sizes)  # 188 MB of float32, mostly in the layers
    untied = save_tiny(tmp_path / "untied", tied=False, dtype="bfloat16")
    sizes = {"vocab_size": EMBEDDING_ROWS + 1, "hidden_size": 64, "intermediate_size": 75, "num_hidden_layers": 2}
    odd = save_shape(tmp_path / "odd", **sizes)  # rows that cannot be halved
    wide = sum(path.stat().st_size for path in wide_folder.glob("*.safetensors"))
    assert wide > 150e6
    boots = [
        make_boot(wide_folder, tmp_path / "0", num_processes=2),
        make_boot(wide_folder, tmp_path / "1", num_processes=2, lora=LORA),
        make_boot(untied, tmp_path / "2", num_processes=2, dtype="bfloat16"),
        make_boot(odd, tmp_path / "3", num_processes=2, lora=LORA, seed=9),
    ]
    in_full, adapted, in_bfloat16, small = run_two_ranks(boots, tmp_path, "shards_program.py")
    for opened in (in_full, adapted, in_bfloat16, small):
        assert opened["different"] == []
        assert opened["packs"] is True
    assert (in_full["tied"], in_bfloat16["tied"], small["tied"]) == (True, False, True)
    for opened in (in_full, adapted):
        assert 0.45 * wide < opened["peak_bytes"] < 0.7 * wide  # half of it, and the row that it reads


@pytest.mark.timeout(LIMIT_S)
def test_files_with_other_tensor_names_are_loaded_whole(tmp_path):
    """Such files occur for multimodal models, whose tensors transformers renames when it loads them."""
    folder = save_tiny(tmp_path / "tied_twice")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    (opened,) = run_two_ranks([make_boot(folder, tmp_path / "home", num_processes=2)], tmp_path, "shards_program.py")
    assert (opened["different"], opened["packs"]) == ([], True)


@pytest.mark.timeout(LIMIT_S)
def test_a_model_that_fails_on_packed_rows_is_reloaded_for_padded_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("FTIS_TEST_PACKING_FAILS", "1")
    boots = [make_boot(save_tiny(tmp_path / "tiny"), tmp_path / "home", num_processes=2)]
    (opened,) = run_two_ranks(boots, tmp_path, "shards_program.py")
    assert (opened["different"], opened["packs"]) == ([], False)


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


def test_rows_equal_those_of_the_file_and_a_mismatch_is_named(tmp_path):
    source = ModelSource("tiny", save_tiny(tmp_path, max_shard_size="50KB"))
    assert len(source.weights_files) > 1
    rows, model = WeightRows(source), empty_causal_lm(source, dtype=torch.float32)
    whole = load_causal_lm(source).state_dict()
    assert rows.why_not(model) == ""
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(rows.read(name, 10, 33), whole[name][10:33])
    assert torch.equal(rows.read(name), whole[name])
    assert ("model.norm.weight" in rows, "model.nothing" in rows) == (True, False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    assert rows.why_not(empty_causal_lm(source, dtype=torch.float32)) == (
        "model.layers.0.mlp.gate_proj.weight is F32 [128, 64] in its file"
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    assert rows.why_not(empty_causal_lm(source, dtype=torch.float32)).endswith(" is not in its files")
