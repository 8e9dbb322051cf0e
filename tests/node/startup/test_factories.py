"""The boot messages of a node's two workers: form of new weights, optimizer, threads, announced address."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from bench.stubs.stub_node import StubTokenizer
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, EngineError
from ftis_node.generation import engines
from ftis_node.generation.engines.vllm_options import engine_arguments
from ftis_node.learner.messages import LearnerBoot
from ftis_node.memory.choice import choose_training
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import ModelSource, resolve_model
from ftis_node.node import worker_settings
from ftis_node.node.startup import factories
from ftis_node.node.startup.worker_boots import generation_boot, learner_boot
from ftis_node.records.identity import Identity
from ftis_node.workers.wire import enc_hook, unpack_body
from tests.models.tiny_models import save_tiny


@pytest.mark.parametrize(
    ("adapters", "settings", "device", "expected"),
    [
        ("auto", {}, "cuda", True), ("auto", {}, "cpu", False), ("auto", {"engine": "torch"}, "cuda", False),
        ("auto", {"lora_adapter": LoraSection(rank=513)}, "cuda", False), ("serve", {}, "cpu", True),
        ("serve", {"engine": "torch"}, "cpu", True), ("auto", {"quantize": "4bit"}, "cpu", True),
    ],
)  # fmt: skip
def test_adapters_are_served_by_vllm_on_a_gpu_or_on_request(monkeypatch, adapters, settings, device, expected):
    for module in (engines, worker_settings):
        monkeypatch.setattr(module, "has_vllm", lambda: True)
    monkeypatch.setattr(worker_settings, "pick_device", lambda device_option: device)
    settings = NodeSettings(**{"model": "m", "lora": True, "generation": {"adapters": adapters}, **settings})
    assert worker_settings.serves_adapters(settings) is expected


def learner_boot_of(tmp_path: Path, text: str, **settings: object) -> LearnerBoot:
    manifest = parse_manifest('name = "a"\ntask = "x"\n[optimizer]\n' + text, source="my.toml")
    node = NodeSettings(**{"model": "m", "device": "cpu", **settings})
    source = ModelSource(name="m", folder=tmp_path)
    return learner_boot(node, manifest, source, Home(tmp_path), WorkerPlacement(), weights=tmp_path)


def test_the_rejection_key_is_derived_from_the_nodes_key(tmp_path):
    """So a restarted node and a repeated experiment have the same one, and peers cannot compute it."""
    source, run = ModelSource(name="m", folder=tmp_path), load_manifest("arithmetic-ftis")

    def key(seed):
        node, identity = NodeSettings(model="m", device="cpu"), Identity.from_seed(bytes([seed]) * 32)
        how: dict[str, Any] = {"weights": tmp_path, "identity": identity}
        return learner_boot(node, run, source, Home(tmp_path), WorkerPlacement(), **how).rejection_key

    assert key(1) == key(1) != key(2)
    assert 2**32 < key(1) < 2**62


def test_the_learner_gets_the_manifests_optimizer(tmp_path):
    text = """
        learning_rate = 2e-5
        lora_learning_rate = 3e-4
        schedule = "linear"
        warmup_steps = 2
        decay_steps = 8
        max_grad_norm = 0.0
        kl_coef = 0.04
        updates_per_batch = 3
    """
    boot = learner_boot_of(tmp_path, text)
    assert [boot.learning_rate_at(step) for step in (1, 2, 10)] == pytest.approx([1e-5, 2e-5, 2e-6])
    settings = boot.optimizer
    assert (settings.max_grad_norm, settings.kl_coef, settings.updates_per_batch) == (0.0, 0.04, 3)
    assert unpack_body(msgspec.msgpack.encode(boot, enc_hook=enc_hook), LearnerBoot) == boot
    assert learner_boot_of(tmp_path, text, lora=True).learning_rate_at(2) == 3e-4
    warmed_up = learner_boot_of(tmp_path, "warmup_steps = 5")
    assert [warmed_up.learning_rate_at(step) for step in (1, 5, 500)] == pytest.approx([2e-7, 1e-6, 1e-6])


def test_a_cut_distribution_has_no_bound_on_understated_logprobs(tmp_path):
    assert learner_boot_of(tmp_path, "").max_logprob_gap_nats == 16.0
    assert learner_boot_of(tmp_path, "[sampling]\ntop_p = 0.9").max_logprob_gap_nats == math.inf


def test_without_vllm_adapters_are_merged_and_a_request_to_serve_them_is_refused(monkeypatch):
    for module in (engines, worker_settings):
        monkeypatch.setattr(module, "has_vllm", lambda: False)
    monkeypatch.setattr(worker_settings, "pick_device", lambda device_option: "cuda")
    assert worker_settings.serves_adapters(
        NodeSettings(model="m", engine="torch", lora=True, generation={"adapters": "serve"})
    )
    assert not worker_settings.serves_adapters(NodeSettings(model="m", lora=True))
    with pytest.raises(EngineError, match="not installed"):
        worker_settings.serves_adapters(NodeSettings(model="m", lora=True, generation={"adapters": "serve"}))


@pytest.mark.parametrize(
    ("engine", "adapters", "expected"),
    [
        ("auto", True, ("vllm", 48, "adapter")), ("torch", True, ("torch", 48, "adapter")),
        ("auto", False, ("auto", None, "model")),
    ],
)  # fmt: skip
def test_both_workers_get_the_same_form(tmp_path, engine, adapters, expected):
    settings = NodeSettings(model="m", engine=engine, lora=True, device="cpu", lora_adapter=LoraSection(rank=48))
    source = resolve_model(str(save_tiny(tmp_path / "m")))
    tokenizer: Any = StubTokenizer()
    run = load_manifest("arithmetic-ftis")
    generation = generation_boot(settings, run, source, tokenizer, WorkerPlacement(), adapters=adapters)
    learner = learner_boot(
        settings, run, source, Home(tmp_path), WorkerPlacement(), weights=tmp_path, adapters=adapters
    )
    assert (generation.engine, generation.settings.lora_rank, learner.publish_as) == expected
    rank = engine_arguments(source, generation.settings, device="cpu", seed=0).get("max_lora_rank")
    assert rank == (64 if adapters else None), "vLLM permits only certain ranks"


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"quantize": "4bit"}, "--quantize 4bit"),
        ({"lora": True, "generation": {"adapters": "serve"}}, "generation.adapters = 'serve'"),
    ],
)
def test_an_adapter_of_a_rank_that_no_engine_serves_is_refused(changes, setting):
    settings = NodeSettings.model_validate({"model": "m"} | changes)
    settings = settings.model_copy(update={"lora_adapter": LoraSection(rank=513)})  # as `continued` does
    with pytest.raises(ConfigError, match=f"rank 513, and engines serve up to 512: remove {setting}"):
        worker_settings.serves_adapters(settings)


def test_a_4_bit_base_implies_an_adapter_and_is_that_of_both_workers(tmp_path):
    settings, tokenizer = NodeSettings(model="m", device="cpu", quantize="4bit"), cast(Any, StubTokenizer())
    source, run = ModelSource(name="m", folder=tmp_path), load_manifest("arithmetic-ftis")
    settings = choose_training(settings, run, Home(tmp_path), source).settings
    assert settings.lora and worker_settings.serves_adapters(settings)
    generation = generation_boot(settings, run, source, tokenizer, WorkerPlacement(), adapters=True)
    assert (generation.settings.quantize, generation.engine) == ("4bit", "auto")
    assert learner_boot_of(tmp_path, "", quantize="4bit").quantize == "4bit"


@pytest.mark.parametrize(
    ("learner", "expected"),
    [({}, (1, 8)), ({"processes": 3}, (3, 2)), ({"gpus": [4, 7]}, (2, 4)), ({"processes": 2, "threads": 5}, (2, 5))],
)
def test_processes_of_a_learner_divide_its_threads(tmp_path, monkeypatch, learner, expected):
    monkeypatch.setattr(worker_settings.os, "cpu_count", lambda: 16)
    boot = learner_boot_of(tmp_path, "", learner=learner)
    assert (boot.settings.num_ranks, boot.num_threads) == expected


def test_an_announced_address_is_checked_before_the_start(tmp_path):
    settings = NodeSettings(model="m", announce=("/dns4/node.example.org/tcp/4001",))
    assert factories.ProcessNodeFactory(settings, Home(tmp_path))._network.announce == settings.announce
    with pytest.raises(ConfigError, match="cannot announce"):
        factories.ProcessNodeFactory(NodeSettings(model="m", announce=("/tcp/4001",)), Home(tmp_path))


@pytest.mark.parametrize(("device", "limit_s"), [("cuda", 300.0), ("cpu", 1800.0)])
def test_a_generation_worker_on_a_cpu_has_more_time_for_one_pass(tmp_path, monkeypatch, device, limit_s):
    monkeypatch.setattr(factories, "pick_device", lambda option: device)
    inputs: Any = SimpleNamespace(
        settings=NodeSettings(model="m", engine="torch"),
        manifest=load_manifest("gsm8k-ftis"),
        source=ModelSource(name="m", folder=tmp_path),
        tokenizer=StubTokenizer(),
        arrangement=WorkerPlacement(),
        home=Home(tmp_path),
    )
    parts: Any = {"events": None, "learner": SimpleNamespace(give_memory_back=None, write_weights=None)}
    client = factories.ProcessNodeFactory(inputs.settings, inputs.home).generation(inputs, **parts)
    assert client.supervisor._spec.timing.stall_timeout_s == limit_s
