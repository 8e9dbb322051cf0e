"""The frozen base of an adapter node on one GPU: the learner computes from the generation worker's own tensors.

Shared memory of the CPU replaces CUDA IPC (`tests/cpu_sharing.py`), and the torch engine vLLM; the rest is real.
"""

import asyncio
import logging
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from learner_rig import LORA, SMALL, make_boot, random_groups

from bench.stubs.random_models import SHAPES, save_random_model
from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import MachineError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.engines.published import base_tensors
from ftis_node.generation.messages import GenerationBoot
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.core import Learner
from ftis_node.learner.model.policy_loading import load_policy, probe_values
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.liveness import RestartPolicy
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.supervisor import WorkerState
from tests import cpu_sharing
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    save_random_model("12m", folder := tmp_path_factory.mktemp("base") / "model", dtype=torch.float32)
    return folder


def shared_memory(pid):
    """Return the bytes of the base's shared memory that a process maps: resident, and its share of them."""
    found, is_shared = dict.fromkeys(("Rss", "Pss"), 0), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_shared = "/torch_" in line
        elif is_shared and (field := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            found[field[1]] += int(field[2]) << 10
    return found


async def test_both_workers_hold_the_base_once_through_steps_and_restarts(model, tmp_path):
    settings = EngineSettings(vocab_size=SHAPES["12m"]["vocab_size"], dtype="float32", device="cpu", lora_rank=4)
    how = {
        "restart_policy": RestartPolicy(backoff=ExponentialBackoff(first_s=0.05)),
        "environment": {"PYTHONPATH": cpu_sharing.site_folder(tmp_path / "site")},
    }
    boot = make_boot(model, tmp_path / "home", lora=LORA, publish_as="adapter", checkpoint_every_steps=100)
    learner = LearnerClient(boot, sockets_dir=tmp_path / "l", log_path=tmp_path / "learner.log", **how)
    generation = GenerationClient(
        GenerationBoot(model=str(model), settings=settings, engine="torch"),
        sockets_dir=tmp_path / "g",
        log_path=tmp_path / "generation.log",
        num_threads=1,
        borrower=learner,
        **how,
    )
    learner.share_base = generation.share_base

    def check_memory():
        size = (model / "model.safetensors").stat().st_size
        for pid in (generation.pid, learner.pid):
            assert shared_memory(pid)["Rss"] > 0.9 * size, "both compute from the same pages"
            assert shared_memory(pid)["Pss"] < 0.6 * size, "each page counts half for each worker"

    try:
        await asyncio.gather(learner.start(), generation.start())
        check_memory()
        steps = {step: random_groups(seed=step, **SMALL) for step in (1, 2)}
        proofs = [(await learner.train(groups, step=step)).proof for step, groups in steps.items()]
        os.kill(learner.pid, signal.SIGKILL)
        await eventually(lambda: learner.restarts == 1, within_s=60)
        assert (await learner.start()).step == 0, "no checkpoint was due"
        replies = [await learner.train(groups, step=step) for step, groups in steps.items()]
        assert [reply.proof for reply in replies] == proofs, "equal in every bit"
        await generation.update_weights(replies[1].weights, replies[1].proof)
        old = generation.pid
        os.kill(old, signal.SIGKILL)
        await eventually(lambda: (generation.restarts, learner.restarts) == (1, 2), within_s=60)
        state = await learner.start()
        assert (state.step, state.proof) == (2, proofs[1]), "it was saved before it followed the generator"
        assert (generation.policy_version, generation.pid != old) == (2, True)
        check_memory()
        await generation.stop()
        assert learner.worker_state is WorkerState.STOPPED, "the process that maps the base ends first"
    finally:
        await asyncio.gather(generation.stop(), learner.stop())


@pytest.fixture
def held(model, monkeypatch):
    """The base's tensors of an engine in this process."""
    cpu_sharing.install(monkeypatch.setattr)
    return base_tensors(load_causal_lm(resolve_model(str(model))))


def test_on_foreign_tensors_a_step_gives_the_same_adapter_and_leaves_the_base(model, held, tmp_path):
    def boot(name, **changes):
        return make_boot(model, tmp_path / name, lora=LORA, publish_as="adapter", **changes)

    own, mapped = boot("own"), boot("mapped", base=Exporter().share(held))
    policy, before = load_policy(mapped), {name: value.clone() for name, value in held.items()}
    for one, other in zip(probe_values(policy), probe_values(load_policy(own)), strict=True):
        assert torch.equal(one, other)
    assert all(".lora_" in name for name in policy.trainable())
    base = {n: v for n, v in policy.causal_lm.named_parameters() if ".lora_" not in n}
    assert all(value.untyped_storage().is_shared() and value.grad is None for value in base.values())
    adapters = []
    for learner in (Learner(own), Learner(mapped)):
        learner.train(random_groups(seed=1, **SMALL), step=1)
        adapters.append(learner.policy.trainable())
        learner.close()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert all(torch.equal(value, before[name]) for name, value in held.items())


def _damage(held):
    held["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1e-6


REFUSALS = {
    "value": (_damage, {}, "other values of model.layers.1.self_attn.k_proj.weight than the model's file"),
    "missing": (
        lambda held: held.pop("model.norm.weight"),
        {},
        "do not fit the model: the file lacks model.norm.weight",
    ),
    "type": (lambda held: None, {"dtype": "bfloat16"}, "in torch.float32, not torch.bfloat16"),
    "engine": (None, {"base_refused": "vLLM holds 3 of 50 tensors in another form"}, "in another form"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_base_that_cannot_be_used_is_copied_or_refused_in_one_line(model, held, tmp_path, caplog, case):
    change, changes, reason = REFUSALS[case]
    if change is not None:
        change(held)
        changes = changes | {"base": Exporter().share(held)}
    boot = make_boot(model, tmp_path, lora=LORA, **changes)
    with pytest.raises(
        MachineError, match=f"^the learner cannot use .*{reason}.*, and two copies do not fit: "
    ) as error:
        load_policy(boot)
    assert "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        policy = load_policy(make_boot(model, tmp_path, lora=LORA, copies_base=True, **changes))
    assert not any(value.untyped_storage().is_shared() for value in policy.causal_lm.parameters())
    (line,) = [record.getMessage() for record in caplog.records if "loads its own copy" in record.getMessage()]
    assert reason in line
