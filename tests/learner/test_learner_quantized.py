"""A LoRA adapter on a base in 4 bits (`--quantize 4bit`): real steps, and the engine that serves them."""

import shutil
from pathlib import Path

import pytest
import torch
from learner_rig import LORA, REQUEST, SMALL, make_boot, random_groups
from safetensors.torch import load_file, save_file

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import MachineError, ModelError
from ftis_node.generation.engines import torch_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.learner.learner import Learner
from ftis_node.learner.model.policy_loading import load_policy
from ftis_node.memory.learner_memory import Workload, base_bytes
from ftis_node.models import load_causal_lm, parameter_count, read_shape, resolve_model
from ftis_node.models.quantized import quantized_shapes
from ftis_node.workers.weight_store import probe_logprobs

SETTINGS = EngineSettings(vocab_size=300, dtype="float32", device="cpu", lora_rank=4, quantize="4bit")


def boot_of(model_folder, home, **changes):
    how = {"lora": LORA, "publish_as": "adapter", "quantize": "4bit", "learning_rate": 1e-2}
    return make_boot(model_folder, home, **how | changes)


async def test_two_steps_on_a_4_bit_base_and_the_engine_agrees_with_the_learner(model_folder, tmp_path):
    learner = Learner(boot_of(model_folder, tmp_path))
    source = resolve_model(str(model_folder))
    engine = await torch_engine.open_engine(source, SETTINGS, lambda: None)
    ours = {name.replace(".base_layer.", "."): weight for name, weight in learner.policy.causal_lm.named_parameters()}
    whole = load_causal_lm(source)
    try:
        assert quantized_shapes(engine._model)
        assert all(torch.equal(ours[name], weight) for name, weight in engine._model.named_parameters())
        proof = learner.state().proof
        assert proof.rms_difference(await engine.probe(proof.probe_ids)) < 1e-5
        assert proof.rms_difference(probe_logprobs(whole, proof.probe_ids)) > 1e-3, "the base has 4 bits"
        assert learner.state().parameters == parameter_count(source)
        for step in (1, 2):
            reply = learner.train(random_groups(seed=step, **SMALL), step=step)
            assert reply.report.num_updates == 1 and reply.report.grad_norm > 0
            await engine.load_weights(Path(reply.weights.path), step)
            before, proof = proof, reply.proof
            assert proof.rms_difference(await engine.probe(proof.probe_ids)) < 1e-5
            assert proof.rms_difference(before.logprobs) > 1e-3, "the step changed the policy"
        assert (await engine.generate(REQUEST)).policy_version == 2
    finally:
        await engine.close()
    again = Learner(boot_of(model_folder, tmp_path)).state()
    assert (again.step, again.proof.logprobs) == (2, proof.logprobs)
    assert Learner(boot_of(model_folder, tmp_path, quantize="none")).state().step == 2, "another policy, the same run"


def test_the_adapter_of_a_4_bit_base_has_the_dtype_of_the_node(model_folder, tmp_path):
    policy = load_policy(boot_of(model_folder, tmp_path, dtype="bfloat16"))
    assert {value.dtype for value in policy.trainable().values()} == {torch.bfloat16}


def test_the_memory_plan_counts_the_bytes_of_a_4_bit_base(model_folder):
    source = resolve_model(str(model_folder))
    weights = [*load_causal_lm(source, dtype="float32", quantize="4bit").parameters()]
    scales = [weight.quant_state.absmax for weight in weights if getattr(weight, "quant_state", None) is not None]
    settings = NodeSettings(model="m", lora=True, quantize="4bit")
    workload = Workload.of(settings, load_manifest("arithmetic-ftis"), on_gpu=False)
    assert base_bytes(read_shape(source), workload) == sum(tensor.nbytes for tensor in (*weights, *scales))


def test_a_4_bit_base_with_weights_that_are_not_finite_is_refused(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.weight has NaN or infinite weights"):
        load_policy(boot_of(folder, tmp_path))


def test_a_4_bit_base_without_bitsandbytes_is_one_line(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.models.quantized.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"^--quantize 4bit needs bitsandbytes: run `pip install .*\[quantize\]"):
        load_policy(boot_of(model_folder, tmp_path))
