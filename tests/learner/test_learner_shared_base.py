"""The frozen base of an adapter node, in memory once for both workers.

Without a GPU both map the model's `file`. On one GPU the learner maps the tensors of the `engine`. Here shared memory
replaces CUDA IPC (`tests/cpu_sharing.py`), and the torch engine vLLM.
"""

import asyncio
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_rig import LORA, REQUEST, SMALL, make_boot, random_groups

from bench.stubs.random_models import SHAPES, save_random_model
from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import MachineError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines import torch_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.engines.published import ServedAdapter
from ftis_node.generation.messages import GenerationBoot
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.learner import Learner
from ftis_node.learner.model.policy_loading import load_policy, probe_values
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.liveness import RestartPolicy
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.supervisor import WorkerState
from tests import cpu_sharing
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)
SETTINGS = EngineSettings(vocab_size=SHAPES["12m"]["vocab_size"], dtype="float32", device="cpu", lora_rank=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    save_random_model("12m", folder := tmp_path_factory.mktemp("base") / "model", dtype=torch.float32)
    return folder


def mapped(pid: int | None, mapping: str) -> dict[str, int]:
    """Return the bytes of mappings with this in their name: resident, the share of the process, private copies."""
    found = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    is_base = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_base = mapping in line
        elif is_base and (field := re.match(r"(Rss|Pss|Anonymous): +(\d+) kB", line)):
            found[field[1]] += int(field[2]) << 10
    return found


def check_views(causal_lm: Any, file: Path) -> None:
    """Assert that all weights but the adapter's lie in a mapping of the file in this process."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f" {file}"))
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    base = {name: value for name, value in causal_lm.named_parameters() if ".lora_" not in name}
    copied = [n for n, value in base.items() if not any(start <= value.data_ptr() < end for start, end in ranges)]
    assert base and not copied


@pytest.mark.parametrize("way", ["file", "engine"])
async def test_both_workers_hold_the_base_once_through_steps_and_restarts(model, tmp_path, way):
    file, is_file = model / "model.safetensors", way == "file"
    how = {
        "restart_policy": RestartPolicy(backoff=ExponentialBackoff(first_s=0.05)),
        "environment": {"PYTHONPATH": cpu_sharing.site_folder(tmp_path / "site")},
    }
    every = 1 if is_file else 100  # steps between checkpoints
    boot = make_boot(model, tmp_path / "home", lora=LORA, publish_as="adapter", checkpoint_every_steps=every)
    learner = LearnerClient(boot, sockets_dir=tmp_path / "l", log_path=tmp_path / "learner.log", **how)
    generation = GenerationClient(
        GenerationBoot(model=str(model), settings=SETTINGS, engine="torch"),
        sockets_dir=tmp_path / "g",
        log_path=tmp_path / "generation.log",
        num_threads=1,
        borrower=None if is_file else learner,
        **how,
    )
    if not is_file:
        learner.share_base = generation.share_base

    def check_memory():
        for pid in (generation.pid, learner.pid):
            of_worker = mapped(pid, str(file) if is_file else "/torch_")
            assert of_worker["Rss"] > 0.9 * file.stat().st_size, "the model computes from these pages"
            assert of_worker["Anonymous"] == 0, "no page of the base was copied"
            assert of_worker["Pss"] < 0.6 * file.stat().st_size, "each page counts half for each worker"

    async def restarted(killed, *clients):
        before = [client.restarts for client in clients]
        for client in killed:
            os.kill(client.pid, signal.SIGKILL)
        await eventually(lambda: [client.restarts - 1 for client in clients] == before, within_s=60)
        return await learner.start()

    try:
        await asyncio.gather(learner.start(), generation.start())
        steps = {step: random_groups(seed=step, **SMALL) for step in (1, 2)}
        replies = [await learner.train(groups, step=step) for step, groups in steps.items()]
        if not is_file:
            assert (await restarted([learner], learner)).step == 0, "no checkpoint was due"
            again = [await learner.train(groups, step=step) for step, groups in steps.items()]
            assert [each.proof for each in again] == [each.proof for each in replies], "equal in every bit"
        reply = replies[1]
        assert reply.weights is not None and reply.weights.num_bytes < file.stat().st_size / 10
        await generation.update_weights(reply.weights, reply.proof)
        served = await generation.generate(REQUEST)
        check_memory()
        state = await restarted([generation, learner] if is_file else [generation], generation, learner)
        again = await generation.generate(REQUEST)
        assert (state.step, state.proof, again.policy_version) == (2, reply.proof, 2)
        assert np.array_equal(again.tokens.logprobs, served.tokens.logprobs)
        check_memory()
        await generation.stop()
        assert (learner.worker_state is WorkerState.STOPPED) is not is_file, "what maps another's memory ends first"
    finally:
        await asyncio.gather(generation.stop(), learner.stop())


async def test_a_served_adapter_leaves_the_mapped_file(model, tmp_path):
    file = model / "model.safetensors"
    boot = make_boot(model, tmp_path, lora=LORA, publish_as="adapter")
    learner = Learner(boot)
    reply = learner.train(random_groups(seed=1, **SMALL), step=1)
    learner.close()
    check_views(learner.policy.causal_lm, file)
    results = []
    for is_copy in (False, True):
        engine = await torch_engine.open_engine(resolve_model(str(model)), SETTINGS, lambda: None)
        check_views(engine._model, file)
        with torch.no_grad():
            for parameter in engine._model.parameters() if is_copy else ():
                parameter.data = parameter.data.clone()
        await engine.load_weights(Path(reply.weights.path), 1)
        results.append((await engine.generate(REQUEST)).tokens)
        await engine.close()
    assert np.array_equal(results[0].token_ids, results[1].token_ids)
    assert np.array_equal(results[0].logprobs, results[1].logprobs), "equal in every bit"


@pytest.fixture
def held(model, monkeypatch):
    """The base's tensors of an engine in this process."""
    cpu_sharing.install(monkeypatch.setattr)
    return ServedAdapter(load_causal_lm(resolve_model(str(model))), {}, max_rank=None).base_tensors()


def test_on_foreign_tensors_a_step_gives_the_same_adapter_and_leaves_the_base(model, held, tmp_path):
    def boot(name, **changes):
        return make_boot(model, tmp_path / name, lora=LORA, publish_as="adapter", **changes)

    own, foreign = boot("own"), boot("foreign", base=Exporter().share(held))
    policy, before = load_policy(foreign), {name: value.clone() for name, value in held.items()}
    for one, other in zip(probe_values(policy), probe_values(load_policy(own)), strict=True):
        assert torch.equal(one, other)
    assert all(".lora_" in name for name in policy.trainable())
    base = [value for name, value in policy.causal_lm.named_parameters() if ".lora_" not in name]
    assert all(value.untyped_storage().is_shared() and value.grad is None for value in base)
    adapters = []
    for learner in (Learner(own), Learner(foreign)):
        learner.train(random_groups(seed=1, **SMALL), step=1)
        adapters.append(learner.policy.trainable())
        learner.close()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert all(torch.equal(value, before[name]) for name, value in held.items())


KEY = "model.layers.1.self_attn.k_proj.weight"
REFUSALS = {
    "value": (lambda held: held[KEY][3, 5].add_(1e-6), {}, f"other values of {KEY} than the model's file"),
    "missing": (lambda held: held.pop("model.norm.weight"), {}, "the file lacks model.norm.weight"),
    "type": (lambda held: None, {"dtype": "bfloat16"}, "in torch.float32, not torch.bfloat16"),
    "engine": (None, {"base_refused": "vLLM holds 3 of 50 tensors in another form"}, "in another form"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_base_that_cannot_be_used_is_copied_or_refused_in_one_line(model, held, tmp_path, caplog, case):
    change, changes, reason = REFUSALS[case]
    if change is not None:
        change(held)
        changes = changes | {"base": Exporter().share(held)}
    with pytest.raises(
        MachineError, match=f"^the learner cannot use .*{reason}.*, and two copies do not fit: "
    ) as error:
        load_policy(make_boot(model, tmp_path, lora=LORA, **changes))
    assert "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        policy = load_policy(make_boot(model, tmp_path, lora=LORA, copies_base=True, **changes))
    assert not any(value.untyped_storage().is_shared() for value in policy.causal_lm.parameters())
    (line,) = [record.getMessage() for record in caplog.records if "loads its own copy" in record.getMessage()]
    assert reason in line
