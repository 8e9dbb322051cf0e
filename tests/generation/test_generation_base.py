"""An adapter's base in a real vLLM, from which a learner in another process computes.

vLLM keeps plain matrices as on a GPU, and shared memory replaces CUDA IPC (`tests/cpu_sharing.py`).
"""

import msgspec
import numpy as np
import pytest
import torch
from generation_support import SETTINGS, save_model

from ftis_node.config.workers import LoraSection
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model.policy_loading import load_policy, probe_values
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.models.loading import tied_names
from ftis_node.workers.shared_tensors import OpenedWeights
from tests import cpu_sharing

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


def boot_of(model, home, **changes):
    return LearnerBoot(
        model=str(model), model_name="tiny", run_id="r", checkpoints_dir=str(home / "c"), weights_dir=str(home / "w"),
        lora=LoraSection(rank=4, alpha=8), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
async def test_a_learner_computes_from_the_tensors_of_vllm(vllm, tmp_path, monkeypatch, tied):
    cpu_sharing.install(monkeypatch.setattr)
    model = save_model(tmp_path / "model", head_dim=32, num_layers=4, tied=tied)
    settings = msgspec.structs.replace(SETTINGS, max_batch=16, max_model_len=64, lora_rank=4)
    await vllm.open(model, settings, is_plain=True)
    shared = await vllm.share_base()
    opened = OpenedWeights(torch.device("cpu"))
    opened.open(shared)
    held = dict(opened.tensors())
    own = load_causal_lm(resolve_model(str(model)))
    expected = {n: v for n, v in own.state_dict().items() if n not in tied_names(own)}
    assert held.keys() == expected.keys()
    assert [n for n in held if not torch.equal(held[n], expected[n])] == []
    print(len(shared.storages), len(held))
    one, other = load_policy(boot_of(model, tmp_path, base=shared)), load_policy(boot_of(model, tmp_path))
    for a, b in zip(probe_values(one), probe_values(other)):
        assert torch.equal(a, b)
