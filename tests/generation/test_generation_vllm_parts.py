"""Parts of the vLLM engine that need no vLLM: its arguments, completions in progress, checks of files."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from generation_support import SETTINGS, completions_of, file_tensors, make_request, save_model
from safetensors.torch import load_file, save_file

from ftis_node.config.workers import GenerationSection
from ftis_node.errors import ConfigError, ModelError, NonFiniteError
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.engines.published import check_published, shapes_in
from ftis_node.generation.engines.vllm_core import VllmCompletion, VllmJob
from ftis_node.generation.engines.vllm_engine import MIN_CPU_CACHE_BYTES, VllmEngine, cpu_cache_bytes, expected_of
from ftis_node.generation.engines.vllm_log import WorkerLog
from ftis_node.generation.engines.vllm_options import engine_arguments, environment, num_loras, quick_start
from ftis_node.generation.engines.vllm_worker import WorkerExtension
from ftis_node.models import ModelSource, load_causal_lm, resolve_model
from ftis_node.records.group import FinishReason
from ftis_node.workers.weight_store import publish_weights
from tests.models.tiny_models import save_tiny

SOURCE = ModelSource("tiny", Path("models/tiny"))
NO_MODEL = ModelSource("m", Path("models/missing"))


def settings(**changed: Any) -> EngineSettings:
    """Return the tests' settings with changes."""
    return msgspec.structs.replace(SETTINGS, **changed)


def arguments(source: ModelSource = SOURCE, *, device: str = "cpu", **changed: Any) -> dict[str, Any]:
    """Return vLLM's arguments for changed settings."""
    return engine_arguments(source, settings(**changed), device=device, seed=5)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cpu", "auto", "float32"), ("cuda", "auto", "bfloat16"), ("cuda", "float32", "float32")],
)
def test_the_device_decides_unset_settings(device, dtype, expected):
    given = arguments(device=device, dtype=dtype, can_sleep=True)
    assert (given["dtype"], given["enforce_eager"]) == (expected, device == "cpu")
    assert given["enable_sleep_mode"] == (device == "cuda")
    assert ("block_size" in given) == (device == "cpu")


def test_adapters_have_no_place_for_embeddings_and_head(tmp_path):
    given = arguments(resolve_model(str(save_tiny(tmp_path / "m"))), lora_rank=16)
    assert given["lora_target_modules"] == [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]
    assert (given["enable_lora"], given["max_lora_rank"]) == (True, 16)


def test_only_set_settings_reach_vllm():
    given = arguments(max_batch=7, memory_share=0.4, max_model_len=99, options={"enforce_eager": False})
    assert (given["max_num_seqs"], given["gpu_memory_utilization"], given["max_model_len"]) == (7, 0.4, 99)
    assert given["seed"] == 5
    assert given["enforce_eager"] is False
    assert [num_loras(can_sleep=can_sleep) for can_sleep in (False, True)] == [3, 2]
    assert not {"gpu_memory_utilization", "enable_lora"} & arguments().keys()
    assert arguments()["logprobs_mode"] == "processed_logprobs"
    assert arguments(is_truncated_sampling=True)["logprobs_mode"] == "raw_logprobs"


@pytest.mark.parametrize(
    ("name", "instead"),
    [("logprobs_mode", ", which ftis-node sets itself"), ("max_num_seqs", ": set generation.max_batch")],
)
def test_options_that_ftis_node_sets_are_refused(name, instead):
    with pytest.raises(ConfigError, match=f"^generation.engine_options must not have '{name}'{instead}$"):
        arguments(options={name: 1})


def test_the_environment_of_a_device():
    """On a CPU the core is in this process, and nothing is compiled; progress bars never fill the log."""
    expected = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "TQDM_DISABLE": "1"}
    on_cpu, on_gpu = (environment(settings(), device=device) for device in ("cpu", "cuda"))
    assert {name: on_cpu.get(name) for name in expected} == expected
    changed = expected | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": None}
    assert {name: on_gpu.get(name) for name in expected} == changed
    assert "TORCHDYNAMO_DISABLE" not in environment(settings(options={"enforce_eager": False}), device="cpu")
    for core, device, separate in (("inside", "cuda", "0"), ("separate", "cpu", "1")):
        found = environment(settings(engine_core=core), device=device)
        assert (found["VLLM_ENABLE_V1_MULTIPROCESSING"], found["VLLM_LOGGING_LEVEL"]) == (separate, "INFO")


@pytest.mark.parametrize(
    ("capability", "options", "expected"),
    [
        ((10, 0), {}, "FLASH_ATTN"),
        ((9, 0), {}, None),
        ((10, 0), {"attention_backend": "FLASHINFER"}, "FLASHINFER"),
        ((10, 0), {"attention_config": {"backend": "FLASHINFER"}}, None),  # vLLM refuses both
    ],
)
def test_no_attention_is_compiled_at_the_start(capability, options, expected):
    given = engine_arguments(SOURCE, settings(options=options), device="cuda", seed=5, capability=capability)
    assert given.get("attention_backend") == expected


NAMES_SCRIPT = """
from dataclasses import fields
import vllm.envs
from vllm.config import KernelConfig
from vllm.engine.arg_utils import EngineArgs
print(*vllm.envs.environment_variables, *(field.name for each in (EngineArgs, KernelConfig) for field in fields(each)))
"""


@pytest.mark.timeout(120)
def test_vllm_knows_every_variable_and_option_of_a_quick_start():
    """The import is in a separate process, because it changes its process."""
    done = subprocess.run([sys.executable, "-c", NAMES_SCRIPT], capture_output=True, check=True, text=True)
    ours = {name for device in ("cpu", "cuda") for name in environment(settings(), device=device)}
    quick = quick_start(settings(), device="cuda")
    named = {name for name in ours if name.startswith("VLLM_")} | {*quick, *quick["kernel_config"]}
    assert named <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("max_batch", "largest"), [(None, [160, 192, 224, 256]), (7, [1, 2, 4, 7]), (300, [192, 224, 256, 300])]
)
def test_graphs_are_captured_for_few_sizes_up_to_the_largest_batch(max_batch, largest):
    assert quick_start(settings(max_batch=max_batch), device="cuda")["cudagraph_capture_sizes"][-4:] == largest
    assert quick_start(settings(max_batch=max_batch), device="cpu") == {}


@pytest.mark.parametrize(
    ("option", "remaining"),
    [
        ({"compilation_config": {}}, {"kernel_config"}),
        ({"enable_flashinfer_autotune": True}, {"cudagraph_capture_sizes"}),
        ({"enforce_eager": True}, set()),
    ],
)
def test_options_of_the_user_replace_those_of_a_quick_start(option, remaining):
    assert quick_start(settings(options=option), device="cuda").keys() == remaining


@pytest.mark.parametrize("backend", ["uni", "external_launcher", "mymodule.MyExecutor", 3])
def test_other_executors_than_mp_and_ray_are_refused(backend):
    with pytest.raises(ValueError, match='give "mp" or "ray"'):
        GenerationSection(engine_options={"distributed_executor_backend": backend})


def test_a_step_on_a_gpu_takes_as_many_tokens_as_the_memory_plan_assumes():
    assert "max_num_batched_tokens" not in arguments()
    assert arguments(device="cuda")["max_num_batched_tokens"] == 8192
    assert arguments(device="cuda", max_batch=9000)["max_num_batched_tokens"] == 9000, "vLLM refuses less"
    assert arguments(device="cuda", options={"max_num_batched_tokens": 512})["max_num_batched_tokens"] == 512


def test_no_sampler_is_compiled_at_the_start_and_gpus_have_the_order_of_vllm():
    assert environment(settings(is_truncated_sampling=True), device="cuda")["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    program = "import os, sys, ftis_node; print('torch' in sys.modules, os.environ['CUDA_DEVICE_ORDER'])"
    for variables, expected in (({}, "PCI_BUS_ID"), ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST")):
        bare = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=bare | variables, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["False", expected]


class FakeVllmWorker(WorkerExtension):
    """vLLM's worker with the parts that the extension uses; `calls` has its actions in order."""

    def __init__(self, device: str) -> None:
        self.calls: list[Any] = []
        self.model_runner = SimpleNamespace(get_model=torch.nn.Module, device=torch.device(device))

    def reload_weights(self, *, weights_iterator: Any) -> None:  # type: ignore[override]
        self.calls.append({name: tensor.tolist() for name, tensor in weights_iterator})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_has_finished_when_new_weights_are_loaded(tmp_path, monkeypatch, device):
    worker = FakeVllmWorker(device)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda name=name: worker.calls.append(name))
    path = publish_weights(tmp_path, 1, {"a": torch.tensor([1.0, 2.0])}).path
    assert worker.ftis_load(path) == {}
    assert worker.calls == [{"a": [1.0, 2.0]}, *(["synchronize", "empty_cache"] if device == "cuda" else [])]


def vllm_config(*, max_num_seqs: int) -> Any:
    """Return 2 layers of 2 heads of 8 in float32: 256 bytes per token, and 16 KiB per sequence of 32 + 32 tokens."""
    model = SimpleNamespace(
        get_num_layers=lambda parallel: 2,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: 8,
        dtype=torch.float32,
        max_model_len=32,
    )
    return SimpleNamespace(
        model_config=model, parallel_config=None, scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs)
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "free_kib", "expected_kib"),
    [(4, 10_000, 64), (4, 160, 40), (4, 4, 16)],  # a full batch; a quarter of the free memory; at least one sequence
)
def test_the_cache_on_a_cpu_holds_a_full_batch_within_its_share_of_free_memory(
    monkeypatch, max_num_seqs, free_kib, expected_kib
):
    monkeypatch.setattr("ftis_node.generation.engines.vllm_engine.free_host_bytes", lambda: free_kib * 1024)
    got = cpu_cache_bytes(vllm_config(max_num_seqs=max_num_seqs))
    assert got == expected_kib * 1024 + MIN_CPU_CACHE_BYTES


def make_partials(num: int, *, seed: int | None = 10) -> tuple[VllmJob, list[VllmCompletion]]:
    """Return a group without sampled tokens, at version 4."""
    job = VllmJob(make_request((1, 2), num_completions=num, seed=seed))
    job.partials = [VllmCompletion(job, index, salt="s", version=4, newest=4) for index in range(num)]
    return job, job.partials


def take(partial: VllmCompletion, *token_ids: int, version: int = 4, logprob: float = -0.5) -> None:
    """Append the tokens of one step. Ids from 90 on are padding."""
    partial.take(token_ids, [logprob] * len(token_ids), version=version, vocab_size=90)


def test_a_completion_has_its_tokens_and_versions():
    job, (first, second) = make_partials(2)
    take(first, 5, 6)
    take(first, 7, version=6, logprob=1e-7)
    first.finish_reason = FinishReason.STOP
    take(second, 8)
    assert not job.has_ended
    second.finish_reason = FinishReason.LENGTH
    assert job.has_ended
    job.finish()
    one, two = completions_of(job.result.result())
    assert (one.token_ids.tolist(), one.logprobs.tolist()) == ([5, 6, 7], [-0.5, -0.5, 0.0])
    assert [(c.policy_version, c.policy_version_newest) for c in (one, two)] == [(4, 6), (4, 4)]
    assert (one.finish_reason, two.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)


def test_an_unfinished_completion_is_aborted_and_nan_raises_an_error():
    job, partials = make_partials(2)
    take(partials[0], 5)
    take(partials[1], 5)
    job.finish()
    assert {completion.finish_reason for completion in completions_of(job.result.result())} == {FinishReason.ABORT}
    broken, partials = make_partials(1)
    take(partials[0], 5, logprob=float("nan"))
    broken.finish()
    assert isinstance(broken.result.exception(), NonFiniteError)


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_head_may_be_missing_from_a_file(tmp_path, tied):
    shapes, optional = shapes_in(resolve_model(str(save_model(tmp_path / "model", tied=tied))))
    assert optional == ({"lm_head.weight"} if tied else set())
    assert ("lm_head.weight" in shapes) is not tied


def test_tensors_that_only_the_models_file_has_are_not_asked_for(tmp_path):
    """The learner loads no such tensor, so it publishes none. Some files of Llama have the first one."""
    folder = save_model(tmp_path / "model")
    file = folder / "model.safetensors"
    ignored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(load_file(file) | ignored, file, metadata={"format": "pt"})
    source = resolve_model(str(folder))
    shapes, optional = shapes_in(source)
    published = publish_weights(tmp_path / "weights", 1, file_tensors(load_causal_lm(source)))
    check_published(Path(published.path), shapes, optional=optional)


async def test_a_model_that_transformers_cannot_build_is_served(tmp_path):
    """A quantized one needs a package that vLLM does not need. The check of published weights builds the model."""
    config = save_model(tmp_path / "model") / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps(json.loads(plain) | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    source = resolve_model(str(config.parent), trains=False)
    with pytest.raises(ImportError):
        shapes_in(source)
    loaded: list[int] = []

    def call(_, load, version):
        loaded.append(version)
        done = Future()
        done.set_result({})
        return done

    driver = SimpleNamespace(call=call, load=None)
    engine = VllmEngine(driver, SETTINGS, expected_of(source), WorkerLog())
    with pytest.raises(ModelError, match="transformers cannot build .* to check its weights: "):
        await engine.load_weights(tmp_path / "model.safetensors", 1)
    config.write_text(plain)
    engine = VllmEngine(driver, SETTINGS, expected_of(source), WorkerLog())
    tensors = file_tensors(load_causal_lm(source))
    await engine.load_weights(Path(publish_weights(tmp_path / "weights", 1, tensors).path), 1)
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"lacks model\.norm\.weight$"):
        await engine.load_weights(Path(publish_weights(tmp_path / "weights", 2, tensors).path), 2)
    assert loaded == [1]
