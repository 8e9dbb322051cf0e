"""An adapter's folder as a model: its base is found, other kinds of adapters are refused, engines get it merged."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import give_sampling_values, make_tokenizer, save_adapter, save_tiny

from ftis_node.config.node import NodeSettings
from ftis_node.errors import ModelError, NetworkError, UntrainableModelError
from ftis_node.models import load_causal_lm, load_tokenizer, model_fingerprint, resolve_model
from ftis_node.models.adapter_folder import continued
from ftis_node.models.loading import merged_source
from ftis_node.workers.weight_store import probe_logprobs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "base", seed=3)


@pytest.fixture
def adapter(tmp_path, base):
    return save_adapter(tmp_path / "tuned", base)


def configure(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_adapter_is_a_model_of_its_own_with_the_files_of_its_base(adapter, base):
    source, plain = resolve_model(str(adapter)), resolve_model(str(base))
    assert (source.name, source.folder, source.path) == ("tuned", base, adapter)
    assert source.base == plain and source.weights_files == plain.weights_files
    assert resolve_model(str(source.path)) == source, "a worker finds the same model"
    assert model_fingerprint(source) != model_fingerprint(plain)
    assert load_tokenizer(source).fingerprint == load_tokenizer(plain).fingerprint
    other = save_adapter(adapter.parent / "other", base, lora_alpha=16)
    assert model_fingerprint(resolve_model(str(other))) != model_fingerprint(source)


def test_the_adapter_is_merged_as_peft_computes_it(adapter, base):
    expected = probe_logprobs(PeftModel.from_pretrained(load_causal_lm(resolve_model(str(base))), adapter), range(20))
    source = resolve_model(str(adapter))
    found = probe_logprobs(load_causal_lm(source), range(20))
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-4
    plain = probe_logprobs(load_causal_lm(source.base), range(20))
    assert max(abs(one - other) for one, other in zip(found, plain, strict=True)) > 0.1
    with merged_source(source, dtype="float32") as merged:
        assert merged.adapter is None and merged.weight_shapes == source.weight_shapes
        assert probe_logprobs(load_causal_lm(merged), range(20)) == found
    assert not merged.folder.exists()


def test_a_base_with_sampling_values_is_merged(tmp_path):
    give_sampling_values(base := save_tiny(tmp_path / "base"))
    with merged_source(resolve_model(str(save_adapter(tmp_path / "tuned", base))), dtype="float32") as merged:
        assert load_causal_lm(merged).generation_config.temperature == 0.9


def test_a_base_beside_the_adapter_and_its_own_tokenizer_are_found(adapter, base):
    shutil.copytree(base, adapter / "under")
    configure(adapter, base_model_name_or_path="under")
    make_tokenizer(chat_template="{{ messages[0]['content'] }}").save_pretrained(adapter)
    source = resolve_model(str(adapter))
    assert source.folder == adapter / "under"
    messages = [{"role": "user", "content": "What"}]
    own, of_base = (load_tokenizer(each).encode_prompt(messages) for each in (source, source.base))
    assert len(own) < len(of_base)


def test_the_trained_adapter_keeps_rank_and_alpha_unless_all_weights_are_trained(adapter):
    source = resolve_model(str(adapter))
    for lora, expected in ((None, (True, 4, 8)), (True, (True, 4, 8)), (False, (False, 128, 256))):
        settings = continued(NodeSettings(model="m", lora=lora), source.adapter)
        assert (settings.lora, settings.lora_adapter.rank, settings.lora_adapter.alpha) == expected
    plain = NodeSettings(model="m")
    assert continued(plain, source.base.adapter) is plain


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"), ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"), ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"target_modules": "all-linear"}, "not a list of layers"),
        ({"target_modules": ["q_proj", "lm_head"]}, "not a list of layers before lm_head"),
        ({"r": 0}, "not whole numbers"), ({"lora_alpha": float("inf")}, "not whole numbers"),
    ],
)  # fmt: skip
def test_other_adapters_are_refused_in_one_line(adapter, changes, reason):
    configure(adapter, **changes)
    with pytest.raises(UntrainableModelError, match=reason) as caught:
        resolve_model(str(adapter))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_tensors_that_do_not_fit_the_base_are_refused(adapter):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"base_model.model.model.norm.weight": torch.ones(64)}, path)
    with pytest.raises(ModelError, match=r"names unknown base_model\.model\.model\.norm"):
        resolve_model(str(adapter))
    path.unlink()
    with pytest.raises(ModelError, match="adapter_model.safetensors is damaged: .*No such file"):
        resolve_model(str(adapter))


@pytest.mark.parametrize(
    ("base_name", "error", "reason"),
    [
        ("/nowhere/base", ModelError, "needs its base model /nowhere/base: no such folder: /nowhere/base"),
        ("org/base", NetworkError, r"needs its base model org/base: cannot fetch org/base"),
        ("", ModelError, "names no base_model_name_or_path"), (".", UntrainableModelError, "is an adapter too"),
    ],
)  # fmt: skip
def test_a_base_that_is_not_found_is_named(adapter, base_name, error, reason, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    configure(adapter, base_model_name_or_path=base_name)
    with pytest.raises(error, match=reason):
        resolve_model(str(adapter))
