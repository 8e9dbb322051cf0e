"""The export of a model: one tensor at a time, in several files if it is large, without a forward pass."""

import weakref

import pytest
import torch
from learner_rig import make_boot
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError
from ftis_node.learner.checkpoint import export
from ftis_node.learner.checkpoint.export import export_newest, gathering_of, write_weights
from ftis_node.learner.model.policy import load_unchecked
from ftis_node.workers.weight_store import probe_logprobs

LORA = LoraSection(rank=4, alpha=8)
FILE_BYTES = 100_000


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_is_written_in_several_files_that_transformers_loads(tmp_path, tied):
    source = save_tiny(tmp_path / "m", tied=tied)
    policy = load_unchecked(make_boot(source, tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    with gathering_of(policy) as gathering:
        write_weights(gathering, out, dtype=torch.float32, max_file_bytes=FILE_BYTES)
    policy.causal_lm.config.save_pretrained(out)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 1
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert probe_logprobs(loaded, range(20)) == probe_logprobs(policy.causal_lm, range(20))


def test_memory_holds_one_merged_tensor_at_a_time(tmp_path, model_folder):
    policy = load_unchecked(make_boot(model_folder, tmp_path, lora=LORA))
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []
    with gathering_of(policy) as gathering:
        take = gathering.take

        def watched(name, tensor):
            own = {value.data_ptr() for value in gathering.tensors.values()}
            alive.append(sum(each() is not None and each().data_ptr() not in own for each in made))
            value = take(name, tensor)
            made.append(weakref.ref(value))
            return value

        gathering.take = watched
        write_weights(gathering, tmp_path, dtype=torch.float32)
    assert len(alive) == len(gathering.tensors) and max(alive) <= 1


def test_a_full_folder_is_refused_before_the_model_is_loaded(tmp_path, model_folder, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    monkeypatch.setattr(export, "load_unchecked", lambda boot: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export_newest(make_boot(model_folder, tmp_path), tmp_path / "out", merge=True)
