"""Publishing weights: shared tensors, files, and the change from one to the other. Exports: one tensor at a time.

Shared memory of the CPU replaces CUDA IPC (`tests/cpu_sharing.py`).
"""

import logging
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from learner_rig import LORA, Emit, make_boot, random_groups
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from ftis_node.errors import ConfigError
from ftis_node.learner import learner as learner_module
from ftis_node.learner.checkpoint import export
from ftis_node.learner.checkpoint.export import export_newest, write_weights
from ftis_node.learner.checkpoint.publication import gathering_of
from ftis_node.learner.client import worker_environment
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import StateRequest, TrainRequest, WeightsWritten, WriteWeights
from ftis_node.learner.model.policy import load_unchecked
from ftis_node.learner.worker import build
from ftis_node.models.loading import own_tensors
from ftis_node.workers.shared_tensors import OpenedWeights
from ftis_node.workers.tensor_file import LockedFiles, checksum, checksums_of, read_tensors
from ftis_node.workers.weight_store import file_checksums, probe_logprobs
from tests import cpu_sharing
from tests.published import published_tensors

BFLOAT16 = {"dtype": "bfloat16", "learning_rate": 1e-3}


@pytest.fixture
def sharing(monkeypatch):
    cpu_sharing.install(monkeypatch.setattr)


def places(learner):
    return {name: tensor.data_ptr() for name, tensor in own_tensors(learner.policy.causal_lm).items()}


def step(learner, number):
    return learner.train(random_groups(seed=number), step=number).weights


@pytest.mark.parametrize("changes", [BFLOAT16, {**BFLOAT16, "optimizer_states": "8bit"}])
def test_steps_do_not_move_weights_in_memory(model_folder, tmp_path, changes):
    """Shared handles rely on it."""
    learner = Learner(make_boot(model_folder, tmp_path, **changes))
    before, first = places(learner), checksums_of(own_tensors(learner.policy.causal_lm))
    for number in (1, 2, 3):
        step(learner, number)
    assert places(learner) == before
    now = checksums_of(own_tensors(learner.policy.causal_lm))
    assert all(now[name] != first[name] for name in now if "weight" in name and "norm" not in name)
    assert len(set(before.values())) == len(before), "tied weights occur once"


def test_each_version_is_read_from_shared_memory_with_its_checksums(model_folder, tmp_path, sharing):
    learner = Learner(make_boot(model_folder, tmp_path, transfer="ipc", **BFLOAT16))
    opened = OpenedWeights(torch.device("cpu"))
    exports = set()
    for number in (1, 2, 3):
        weights = step(learner, number)
        assert (weights.transfer, weights.path, weights.fell_back, weights.version) == ("ipc", "", "", number)
        opened.open(weights.shared)
        seen = dict(opened.tensors())
        assert {name: checksum(tensor) for name, tensor in seen.items()} == weights.checksums
        assert all(seen[name].equal(tensor) for name, tensor in own_tensors(learner.policy.causal_lm).items())
        exports.add(weights.shared.export_id)
    assert len(exports) <= 2  # the first export moves the tensors of a CPU
    assert list((tmp_path / "weights").glob("*")) == []
    resumed = Learner(make_boot(model_folder, tmp_path, transfer="ipc", **BFLOAT16))
    weights = resumed.state().weights
    opened.open(weights.shared)
    assert {name: checksum(tensor) for name, tensor in opened.tensors()} == weights.checksums
    assert weights.version == 3


def test_a_file_is_written_on_request_and_only_a_failure_to_map_ends_sharing(model_folder, tmp_path, sharing, caplog):
    learner = Learner(make_boot(model_folder, tmp_path, transfer="ipc", **BFLOAT16))
    assert learner.write_weights() is None, "version 0 is the initial model"
    shared = step(learner, 1)
    written = learner.write_weights()
    assert (written.version, written.transfer, written.checksums) == (1, "file", shared.checksums)
    assert file_checksums(Path(written.path)) == shared.checksums
    assert step(learner, 2).transfer == "ipc"
    with caplog.at_level(logging.WARNING):
        refused = learner.write_weights(refused="CUDA error: invalid argument")
    assert (refused.version, refused.transfer, refused.shared) == (2, "file", None)
    assert refused.fell_back == "CUDA error: invalid argument"
    assert refused.how() == "file (CUDA error: invalid argument)"
    assert learner.state().weights == refused
    later = step(learner, 3)
    assert (later.transfer, later.fell_back) == ("file", "CUDA error: invalid argument")
    assert published_tensors(tmp_path / "weights", 3).keys() == shared.checksums.keys()
    lines = [record.getMessage() for record in caplog.records if "from now on" in record.getMessage()]
    assert lines == ["weights are sent in files from now on: CUDA error: invalid argument"]


@pytest.mark.parametrize(
    ("changes", "reason"), [({}, "there is no GPU whose memory could be shared"), ({"lora": LORA}, "a merged adapter")]
)
def test_weights_that_cannot_be_shared_are_written_to_files(model_folder, tmp_path, changes, reason):
    """Torch's functions run without a replacement, on a machine without CUDA."""
    learner = Learner(make_boot(model_folder, tmp_path, transfer="ipc", **BFLOAT16, **changes))
    for number in (1, 2):
        weights = step(learner, number)
        assert weights.transfer == "file"
        assert weights.fell_back.startswith(reason)
        assert file_checksums(Path(weights.path)) == weights.checksums


def test_page_locked_files_have_the_content_of_plain_ones(model_folder, tmp_path, monkeypatch):
    locked = []
    monkeypatch.setattr("ftis_node.workers.tensor_file.register", lambda mapping: locked.append(mapping.numel()))
    monkeypatch.setattr("ftis_node.workers.tensor_file.unregister", lambda mapping: locked.remove(mapping.numel()))
    learner = Learner(make_boot(model_folder, tmp_path, transfer="pinned", **BFLOAT16))
    plain = Learner(make_boot(model_folder, tmp_path / "plain", **BFLOAT16))
    for number in (1, 2, 3):
        weights, other = step(learner, number), step(plain, number)
        assert (weights.transfer, other.transfer) == ("pinned", "file")
        assert Path(weights.path).read_bytes() == Path(other.path).read_bytes()
        assert read_tensors(Path(weights.path), locked=LockedFiles()).keys() == weights.checksums.keys()
    learner.close()
    assert len(locked) == 3, "mappings of readers"


async def test_the_worker_writes_after_the_step_in_progress(model_folder, tmp_path, sharing):
    published = []
    emit = Emit(published.append)
    async with build(make_boot(model_folder, tmp_path, transfer="ipc"), emit) as handlers:
        await handlers[StateRequest](StateRequest(), emit)
        reply = await handlers[TrainRequest](TrainRequest(step=1, groups=tuple(random_groups())), emit)
        assert reply.weights.transfer == "ipc"
        written = await handlers[WriteWeights](WriteWeights(), emit)
    assert isinstance(written, WeightsWritten)
    assert file_checksums(Path(written.weights.path)) == reply.weights.checksums
    assert published[0].shared == reply.weights.shared


def test_segments_grow_only_after_shared_weights_are_allocated(model_folder, tmp_path, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr("ftis_node.learner.learner.grow_segments", lambda: calls.append("grow") or True)
    make_masters = learner_module.make_masters
    monkeypatch.setattr(learner_module, "make_masters", lambda *given: calls.append("masters") or make_masters(*given))
    for transfer, share, grows in (("ipc", 0.5, True), ("ipc", None, False), ("file", 0.5, False)):
        boot = make_boot(model_folder, tmp_path / f"{transfer}{share}", transfer=transfer, memory_share=share)
        environment = worker_environment(msgspec.structs.replace(boot, device="cuda"))
        assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == (transfer == "file")
        calls.clear()
        Learner(boot)
        assert calls == (["grow", "masters"] if grows else ["masters"])


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
