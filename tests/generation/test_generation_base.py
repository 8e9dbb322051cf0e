"""An adapter's base in a real vLLM, from which a learner in another process computes.

vLLM keeps plain matrices as on a GPU, and shared memory replaces CUDA IPC (`tests/cpu_sharing.py`).
"""

import msgspec
import numpy as np
import pytest
import torch
from generation_support import NEVER, SETTINGS, completions_of, fresh_logprobs, make_request, save_model
from safetensors.torch import load_file, save_file

from ftis_node.config.workers import LoraSection
from ftis_node.errors import SharingError
from ftis_node.learner.checkpoint.publication import WeightPublication, proof_of
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model.policy_loading import load_policy, probe_values
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.models.loading import tied_names
from ftis_node.workers.shared_tensors import OpenedWeights
from tests import cpu_sharing

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPT = (3, 1, 4, 1, 5)
LORA = LoraSection(rank=4, alpha=8)


def boot_of(model, home, **changes):
    given = {"model": str(model), "model_name": "tiny", "run_id": "r", "lora": LORA, **changes}
    return LearnerBoot(checkpoints_dir=str(home / "c"), weights_dir=str(home / "w"), **given)


@pytest.mark.parametrize("tied", [True, False])
async def test_a_learner_computes_from_the_tensors_of_vllm(vllm, tmp_path, monkeypatch, tied):
    """The embedding has 96 rows, to which vLLM adds more. q, k, v and gate, up are parts of joined maps."""
    cpu_sharing.install(monkeypatch.setattr)
    model = save_model(tmp_path / "model", head_dim=32, num_layers=2, tied=tied, spread=0.1)
    tensors = load_file(model / "model.safetensors")
    biased = {name: torch.randn_like(value) if "bias" in name else value for name, value in tensors.items()}
    save_file(biased, model / "model.safetensors", metadata={"format": "pt"})
    settings = msgspec.structs.replace(SETTINGS, max_batch=16, max_model_len=64, lora_rank=4)
    await vllm.open(model, settings, is_plain=True)
    shared, opened = await vllm.share_base(), OpenedWeights(torch.device("cpu"))
    opened.open(shared)
    held, own = dict(opened.tensors()), load_causal_lm(resolve_model(str(model)))
    expected = {name: value for name, value in own.state_dict().items() if name not in tied_names(own)}
    assert (held.keys(), len(shared.storages) < len(held)) == (expected.keys(), True)
    assert [name for name, value in held.items() if not torch.equal(value, expected[name])] == []
    assert sum("bias" in name for name in held) == 6

    policy = load_policy(boot_of(model, tmp_path, base=shared))
    for one, other in zip(probe_values(policy), probe_values(load_policy(boot_of(model, tmp_path))), strict=True):
        assert torch.equal(one, other), "log-probs and a gradient are equal in every bit"
    with torch.no_grad():
        for value in policy.trainable().values():
            value.add_(0.05 * torch.randn_like(value))
    weights = WeightPublication(policy, tmp_path / "w", form="adapter").publish(1)
    await vllm.update_weights(weights, proof_of(policy, version=1))
    request = make_request(PROMPT, num_completions=2, max_tokens=12, eos_ids=NEVER)
    for completion in completions_of(await vllm.generate(request)):
        found = fresh_logprobs(policy.causal_lm, PROMPT, completion)
        np.testing.assert_allclose(completion.logprobs, found, atol=1e-5, rtol=0)
    assert all(torch.equal(value, expected[name]) for name, value in held.items()), "an adapter changes no base"


async def test_vllm_with_packed_matrices_shares_no_base(vllm, tmp_path):
    await vllm.open(save_model(tmp_path / "model", head_dim=32), msgspec.structs.replace(SETTINGS, max_model_len=64))
    with pytest.raises(SharingError, match="^vLLM holds 14 of 26 tensors in another form, such as "):
        await vllm.share_base()
