"""The placement that `join` derives from the memory plan: time sharing, shares of a GPU, refusals, boot messages."""

import logging

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.errors import MachineError, ModelError
from ftis_node.generation.engines.core_process import is_wsl
from ftis_node.generation.engines.vllm_options import engine_arguments
from ftis_node.lab.tiny_tokenizer import make_tokenizer
from ftis_node.memory import machine as machine_module
from ftis_node.memory import placement
from ftis_node.memory.machine import USABLE_SHARE, transfer_of
from ftis_node.memory.placement import WorkerPlacement, arrange, place_workers_on
from ftis_node.models import ModelSource, PromptTokenizer
from ftis_node.node.startup import worker_boots as makers
from ftis_node.node.startup.worker_boots import generation_boot, learner_boot
from ftis_node.node.storage.home_size import num_versions
from tests.memory.planning import GIB, HALF_B, RUN, THREE_B, arranged, machine, of_learner, planned, vllm_settings


def test_on_a_shared_gpu_the_engine_has_the_plans_share_and_cache():
    made = planned(HALF_B, 24)
    assert made.placement == "shared"
    assert arranged(HALF_B, 24) == WorkerPlacement(
        memory_share=made.gpu_memory_utilization,
        cache_bytes=made.kv_cache_bytes,
        learner_share=made.learner_share,
        transfer="ipc",
        **of_learner(made),
    )


def test_on_a_shared_gpu_the_learner_is_limited_to_the_memory_without_the_engine():
    made = planned(HALF_B, 24)
    of_generator = sum(value for name, value in made.parts.items() if name.startswith("generator"))
    assert made.learner_share is not None
    free = made.usable_bytes - of_generator - made.parts["learner: context"]
    assert 0 <= free - made.learner_share * 24 * GIB < 0.001 * 24 * GIB
    assert made.learner_share * 24 * GIB >= made.peak_bytes - of_generator - made.parts["learner: context"]
    for other in (planned(THREE_B, 24, lora=True), planned(HALF_B, 24, 24), planned(HALF_B), planned(THREE_B, 4)):
        assert (other.placement != "shared", other.learner_share) == (True, None)
    assert arranged(HALF_B, 24, memory={"placement": "time_shared"}).learner_share is None


@pytest.mark.parametrize(
    ("gpus", "changes", "transport"),
    [
        ((24,), {}, "ipc"), ((24,), {"memory": {"placement": "time_shared"}}, "ipc"),
        ((24,), {"engine": "torch"}, "ipc"), ((24, 24), {}, "pinned"),
        ((80, 24, 24), {"learner": {"processes": 2}}, "pinned"), ((24,), {"lora": True}, "file"),
        ((24,), {"lora": True, "generation": {"adapters": "merge"}}, "pinned"),
        ((24,), {"lora": True, "engine": "torch"}, "pinned"), ((), {}, "file"),
    ],
)  # fmt: skip
def test_the_transport_of_weights_follows_from_the_plan(gpus, changes, transport):
    assert arranged(HALF_B, *gpus, **changes).transfer == transport


@pytest.mark.parametrize(
    ("engine", "placement", "gpus_gib", "takes_turns", "can_sleep"),
    [
        ("vllm", "time_shared", (24,), True, True), ("vllm", "shared", (24,), False, False),
        ("torch", "auto", (24,), False, False), ("torch", "time_shared", (24,), True, False),
        ("vllm", "auto", (), False, False), ("vllm", "time_shared", (), True, False),
        ("vllm", "time_shared", (24, 24), False, False),
    ],
)  # fmt: skip
def test_the_setting_overrides_the_plan_on_one_device(engine, placement, gpus_gib, takes_turns, can_sleep):
    made = arranged(HALF_B, *gpus_gib, engine=engine, memory={"placement": placement})
    assert (made.takes_turns, made.can_sleep) == (takes_turns, can_sleep)


def test_a_model_that_does_not_fit_is_refused_in_one_line():
    with pytest.raises(MachineError) as refused:
        arranged(THREE_B, 24)
    line = str(refused.value)
    made = planned(THREE_B, 24)
    assert f"{made.peak_bytes / GIB:.2f} GiB needed, {made.usable_bytes / GIB:.2f} GiB usable" in line
    assert "--lora (rank 128) would suffice" in line
    assert refused.value.exit_code == 3
    assert "\n" not in line


def test_with_check_warn_a_model_that_does_not_fit_is_time_shared(caplog):
    with caplog.at_level(logging.WARNING):
        made = arranged(THREE_B, 4, memory={"check": "warn"})
    assert [record.message for record in caplog.records][0].startswith("m does not fit on the GPU")
    assert (made.takes_turns, made.can_sleep, made.memory_share) == (True, True, USABLE_SHARE)


def test_too_little_host_memory_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        made = place_workers_on(machine(host_gib=0.5), HALF_B, vllm_settings(), RUN)
    assert made == WorkerPlacement()
    assert "memory may be short: m seems to need" in caplog.text


def test_without_a_shape_there_is_no_plan_and_the_engine_uses_its_defaults():
    assert arranged(None, 24) == WorkerPlacement(takes_turns=True, can_sleep=True, transfer="ipc")
    assert arranged(None, 24, 24) == WorkerPlacement(generator_gpus=(0,), learner_gpus=(1,), transfer="pinned")


def test_an_unreadable_shape_is_logged_and_gives_no_plan(monkeypatch, caplog):
    def unreadable(source):
        raise ModelError("config.json describes a mixture of experts: its memory cannot be planned")

    monkeypatch.setattr(placement, "read_shape", unreadable)
    monkeypatch.setattr(placement, "pick_device", lambda device: "cpu")
    with caplog.at_level(logging.WARNING):
        assert arrange(vllm_settings(engine="auto"), RUN, source=None) == WorkerPlacement()  # type: ignore[arg-type]
    assert "mixture of experts" in caplog.text


def test_the_boot_messages_contain_the_placement(tmp_path):
    made = WorkerPlacement(takes_turns=True, can_sleep=True, memory_share=0.5, cache_bytes=GIB, learner_share=0.25)
    source = ModelSource(name="m", folder=tmp_path)
    tokenizer = PromptTokenizer(make_tokenizer(), name="tiny")
    boot = generation_boot(vllm_settings(device="cpu"), RUN, source, tokenizer, made)
    arguments = engine_arguments(source, boot.settings, device="cuda", seed=0)
    assert (arguments["gpu_memory_utilization"], arguments["kv_cache_memory_bytes"]) == (0.5, GIB)
    assert arguments["enable_sleep_mode"] is True
    assert engine_arguments(source, boot.settings, device="cpu", seed=0)["enable_sleep_mode"] is False
    learning = learner_boot(vllm_settings(device="cpu"), RUN, source, Home(tmp_path), made, weights=tmp_path)
    assert (learning.takes_turns, learning.memory_share) == (True, 0.25)


def test_the_learner_boot_contains_the_plans_recomputation_and_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(makers, "pick_device", lambda device: "cuda")
    source = ModelSource(name="m", folder=tmp_path)

    def booted(*gpus_gib, **changes):
        given = vllm_settings(**changes)
        made = place_workers_on(machine(*gpus_gib), HALF_B, given, RUN)
        boot = learner_boot(given, RUN, source, Home(tmp_path), made, weights=tmp_path)
        return boot.recompute_activations, boot.may_recompute, boot.head_chunk_tokens

    # 16,384 tokens of a 0.5B model keep 24 GiB of activations.
    assert booted(139) == (False, True, 2048)
    assert booted(24) == (True, True, 2048)
    assert booted(139, learner={"recompute_activations": True}) == (True, False, 2048)
    assert booted(139, learner={"recompute_activations": False}) == (False, False, 2048)
    assert learner_boot(
        vllm_settings(), RUN, source, Home(tmp_path), WorkerPlacement(), weights=tmp_path
    ).recompute_activations, "without a plan activations are recomputed"


def test_wsl_is_recognized_by_the_kernel_release():
    assert is_wsl("5.15.153.1-Microsoft-standard-WSL2")
    assert not is_wsl("6.8.0-45-generic")


def test_on_wsl_an_engine_does_not_map_the_learners_weights(monkeypatch):
    for on_wsl, transfer in ((False, "ipc"), (True, "pinned")):
        monkeypatch.setattr(machine_module, "IS_WSL", on_wsl)
        assert transfer_of(NodeSettings(model="m"), on_gpu=True, shares_gpu=True, serves_adapters=False) == transfer


def test_a_node_that_maps_weights_keeps_fewer_versions_on_disk():
    settings = NodeSettings(model="m")
    assert (num_versions(settings), num_versions(settings, "pinned"), num_versions(settings, "ipc")) == (3, 3, 2)
