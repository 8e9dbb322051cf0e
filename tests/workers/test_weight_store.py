"""Published weights and their proof."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis_node.config.home import Home
from ftis_node.workers.tensor_file import read_tensors
from ftis_node.workers.weight_store import WeightProof, probe_token_ids, prove, publish_weights, weights_folder
from tests.published import newest_version, published_tensors


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((4,), value, dtype=torch.bfloat16)}


def test_the_file_of_an_old_version_is_reused_unless_it_is_linked(tmp_path):
    first, held = (Path(publish_weights(tmp_path, version, tensors(float(version))).path) for version in (1, 2))
    file_number = first.stat().st_ino
    os.link(held, tmp_path / "held")
    assert Path(publish_weights(tmp_path, 3, tensors(3.0)).path).stat().st_ino == file_number
    assert float(published_tensors(tmp_path, 3)["b"][-1]) == 3.0
    publish_weights(tmp_path, 4, tensors(4.0))
    assert float(read_tensors(tmp_path / "held")["a"][0, 0]) == 2.0


def test_a_file_of_another_size_is_created_again(tmp_path):
    for version, length in ((1, 3), (2, 3), (3, 9), (4, 2)):
        publish_weights(tmp_path, version, {"a": torch.full((length,), float(version))}, dtype=torch.bfloat16)
        assert torch.equal(
            published_tensors(tmp_path, version)["a"], torch.full((length,), float(version), dtype=torch.bfloat16)
        )


def test_a_failed_publication_leaves_no_version(tmp_path):
    publish_weights(tmp_path, 1, tensors(1.0))
    with pytest.raises(ValueError, match="b is of torch.int64: it cannot be written as torch.float32"):
        publish_weights(tmp_path, 2, {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}, dtype=torch.float32)
    assert newest_version(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000001"]


def test_probe_ids_are_fixed_and_inside_the_vocabulary():
    assert probe_token_ids(151_665)[:4] == (146_596, 23_701, 18_632, 47_402)
    for vocab_size in (2, 37, 151_665):
        ids = probe_token_ids(vocab_size)
        assert len(ids) == 32
        assert all(0 <= token < vocab_size for token in ids)
    assert len(set(probe_token_ids(151_665))) == 32


def test_a_proof_has_the_log_probs_of_the_probe_and_differs_between_models():
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    models = [Qwen2ForCausalLM(config).eval() for _ in range(2)]
    proofs = [prove(model, version=4, vocab_size=60) for model in models]
    ids = torch.tensor([proofs[0].probe_ids])
    with torch.no_grad():
        by_loss = models[0](input_ids=ids, labels=ids).loss  # the mean of transformers over the same positions
    assert -sum(proofs[0].logprobs) / 31 == pytest.approx(float(by_loss), abs=1e-6)
    assert proofs[0].rms_difference(prove(models[0], version=4, vocab_size=60).logprobs) == 0.0
    assert proofs[0].rms_difference(proofs[1].logprobs) > 1e-3


def test_log_probs_that_are_not_comparable_differ_by_infinity():
    proof = WeightProof(version=1, probe_ids=(1, 2, 3), logprobs=(-1.0, -2.0))
    assert proof.rms_difference((-1.3, -2.4)) == pytest.approx((0.5 * (0.3**2 + 0.4**2)) ** 0.5)
    assert proof.rms_difference((-1.0,)) == math.inf
    assert proof.rms_difference((-1.0, math.nan)) == math.inf
    assert proof.rms_difference((math.nan, -2.0)) == math.inf


def test_each_node_has_a_private_folder_in_memory_and_removes_it(tmp_path):
    memory = tmp_path / "memory"
    for folder in (memory, tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    with weights_folder(Home(tmp_path / "a"), version_bytes=10, memory_disk=memory) as first:
        with weights_folder(Home(tmp_path / "b"), version_bytes=10, memory_disk=memory) as second:
            assert first.parent == second.parent == memory
            assert first != second
            assert first.stat().st_mode & 0o777 == 0o700
        (first / "left").write_text("a file of a killed node")
        with weights_folder(Home(tmp_path / "a"), version_bytes=10, memory_disk=memory) as again:
            assert (again, list(again.iterdir())) == (first, [])
    assert list(memory.iterdir()) == []


def test_weights_too_large_for_memory_are_published_in_the_home(tmp_path):
    home = Home(tmp_path)
    too_large = shutil.disk_usage(tmp_path).free // 4
    with weights_folder(home, version_bytes=too_large, memory_disk=tmp_path) as folder:
        assert folder == home.weights
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path / "nowhere") as folder:
        assert folder == home.weights


def test_published_versions_in_the_home_are_removed_and_followed_ones_kept(tmp_path):
    home = Home(tmp_path / "home")
    home.create()
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path / "nowhere") as folder:
        for name in ("weights-00000001", "followed"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file").write_text("bytes")
    assert [path.name for path in home.weights.iterdir()] == ["followed"]


def test_a_symbolic_link_of_that_name_is_not_used(tmp_path):
    home, elsewhere = Home(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path) as folder:
        name = folder.name
    (tmp_path / name).symlink_to(elsewhere)
    with weights_folder(home, version_bytes=1, memory_disk=tmp_path) as folder:
        assert folder == home.weights
    assert elsewhere.is_dir()
