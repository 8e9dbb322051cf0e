"""The memory estimate, compared with figures by hand and with the tensors and allocations of a real training step.

The figures by hand are for SMALL, a tied Qwen2 configuration with 2 layers, 4 heads and 320 ids. Its hidden size is 64,
its query width 64, its key/value width 32, and its intermediate size 128.

    embedding     320 x 64                                                                       20,480
    a layer       64 x 64 + 2 x 64 x 32 + 64 x 64 + 3 x 64 x 128 + biases 128 + norms 128        37,120
    parameters    20,480 + 2 x 37,120 + 64                                                       94,784
    adapter, r 8  2 x 8 x (128 + 96 + 96 + 128 + 3 x 192)                                        16,384
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import LoraSection
from ftis_node.learner.batch import MicroBatch
from ftis_node.learner.model import attention
from ftis_node.learner.model.activations import recompute_activations, replace_gated_blocks
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.model.lora import add_adapter
from ftis_node.learner.step.optimizer import make_masters, make_optimizer, moments_of
from ftis_node.memory.generator import cache_bytes_per_token, generator_memory
from ftis_node.memory.learner_memory import HOST_PROCESS_BYTES, Workload, layer_bytes_per_token, learner_memory
from ftis_node.models import shape_of
from ftis_node.telemetry.terminal_text import MIB
from tests.learner.learner_rig import make_boot
from tests.models import tiny_models
from tests.models.test_model_shape import QWEN_05B
from tests.models.tiny_models import make_model

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = shape_of(QWEN_05B | SIZES | {"intermediate_size": 128, "vocab_size": 320})


def workload(**changes: Any) -> Workload:
    values = {
        "dtype_bytes": 2, "lora": False, "adapter_rank": 8, "micro_batch_tokens": 1000, "recompute_activations": False,
        "max_batch": 10, "max_prompt_tokens": 40, "max_total_tokens": 100, "group_size": 4, "num_groups": 24,
        "own_groups": 12, "on_gpu": True, "can_sleep": True,
    }  # fmt: skip
    return Workload(**values | changes)


def test_the_memory_of_a_generator_by_hand():
    # Cache per token: 2 x 2 layers x 32 x 2 bytes = 256. Ten completions of 100 tokens, or one group of four.
    memory = generator_memory(SMALL, workload())
    assert cache_bytes_per_token(SMALL, 2) == 256
    assert (memory.weights, memory.cache, memory.smallest_cache) == (2 * 94_784, 256_000, 102_400)
    # Sampling 24 x 10 x 320; prefill 2,048 x (3 x 128 + 6 x 64) x 2; context 717 MiB.
    # Graphs are captured for 1, 2, 4, 8 and 10 rows.
    assert memory.workspace == 76_800 + 3_145_728 + 1236 * MIB
    assert memory.asleep == (717 + 384 + 5 * 27) * MIB
    assert generator_memory(SMALL, workload(max_batch=256)).asleep == (717 + 384 + 14 * 27) * MIB
    # New weights are staged module by module. The embedding is larger than gate and up together, 2 x 64 x 128.
    assert (memory.adapters, memory.staging) == (0, 2 * 20_480)
    assert generator_memory(SMALL, workload(on_gpu=False)).staging == 0


def test_the_memory_of_served_adapters_by_hand():
    # An adapter of rank 8 in bfloat16 has 2 x 16,384 bytes. vLLM keeps three slots, or two if the engine sleeps
    # between steps. Its graphs take more memory.
    memory = generator_memory(SMALL, workload(lora=True, serves_adapters=True))
    assert (memory.adapters, memory.in_turns.adapters, memory.staging) == (3 * 32_768, 2 * 32_768, 0)
    assert memory.fixed == memory.weights + memory.workspace + 3 * 32_768
    assert memory.asleep == (717 + 640 + 5 * 45) * MIB
    # vLLM has no slots of rank 9 and takes rank 16. An adapter of rank 1,024 cannot be served and is merged.
    assert generator_memory(SMALL, workload(lora=True, serves_adapters=True, adapter_rank=9)).adapters == 6 * 32_768
    for changes in ({"lora": False}, {"adapter_rank": 1024}, {"serves_adapters": False}):
        merged = generator_memory(SMALL, workload(**{"lora": True, "serves_adapters": True} | changes))
        assert (merged.adapters, merged.in_turns.adapters, merged.staging) == (0, 0, 2 * 20_480)


def test_the_starting_model_is_kept_for_a_kl_term_unless_an_adapter_is_trained():
    assert learner_memory(SMALL, workload()).start == 0
    memory = learner_memory(SMALL, workload(holds_start=True))
    assert memory.start == 2 * 94_784
    assert memory.resident == learner_memory(SMALL, workload()).resident + 2 * 94_784
    for lora, beta, expected in ((False, 0.1, True), (True, 0.1, False), (False, 0.0, False)):
        run = load_manifest("gsm8k-ftis")
        run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"kl_coef": beta})})
        settings = NodeSettings(model="m", lora=lora)
        assert Workload.of(settings, run, on_gpu=True).holds_start == expected


def test_the_memory_of_8_bit_and_offloaded_states_by_hand():
    small = learner_memory(SMALL, workload(optimizer_states="8bit"))
    assert small.moments == 2 * 94_784 + 94_784 // 32  # with a float32 scale for every 256 values of each moment
    offloaded = learner_memory(SMALL, workload(optimizer_states="offload"))
    assert (offloaded.weights, offloaded.on_host) == (189_568, 16 * 94_784)
    assert offloaded.masters == offloaded.moments == offloaded.gradients == 0
    assert learner_memory(SMALL, workload()).on_host == 0


def test_a_micro_batch_is_between_one_completion_and_the_whole_batch():
    assert workload(micro_batch_tokens=16).largest_micro_batch == 100
    assert workload(micro_batch_tokens=10**6).largest_micro_batch == 24 * 4 * 100


class Step:
    """The learner's forward and backward pass of a real model on the CPU, and the workload that describes it."""

    def __init__(
        self, dtype: str, lora: bool, *, recompute: bool = False, layers_kept: int = 0, hidden_size: int = 64
    ) -> None:
        attention.register()
        self.model = make_model(hidden_size=hidden_size).to(getattr(torch, dtype))
        self.model.set_attn_implementation(attention.ATTENTION)
        if lora:
            self.model.requires_grad_(False)
            add_adapter(self.model, LoraSection(rank=8, alpha=8))
        if recompute:
            recompute_activations(self.model, layers_kept=layers_kept)
        replace_gated_blocks(self.model)
        self.shape = shape_of(make_model(hidden_size=hidden_size).config.to_dict())
        self.settings = {"lora": lora, "recompute_activations": recompute, "layers_kept": layers_kept}
        self.settings["dtype_bytes"] = 2 if dtype == "bfloat16" else 4
        trainable = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.boot = make_boot("tiny", Path("nowhere"))
        self.masters = make_masters(trainable, self.boot)

    def workload(self, num_tokens: int) -> Workload:
        return workload(micro_batch_tokens=num_tokens, on_gpu=False, **self.settings)

    def forward(self, num_tokens: int) -> torch.Tensor:
        positions = torch.arange(num_tokens - 1)
        ids = torch.randint(0, 300, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        micro_batch = MicroBatch(
            ids,
            predictor_index=positions,
            target_ids=ids[0, 1:],
            cell_index=positions,
            positions=torch.arange(num_tokens)[None],
            texts=((range(0, num_tokens),),),
        )
        return completion_logprobs(self.model, micro_batch)

    def run(self, num_tokens: int) -> None:
        self.forward(num_tokens).mean().backward()


SETTINGS = [("bfloat16", False), ("bfloat16", True), ("float32", False), ("float32", True)]


@pytest.mark.parametrize(("dtype", "lora"), SETTINGS)
def test_weights_gradients_and_moments_equal_the_tensors(dtype, lora):
    step = Step(dtype, lora)
    masters = step.masters.tensors.values()
    optimizer = make_optimizer(step.masters, step.boot)
    step.run(16)
    memory = learner_memory(step.shape, step.workload(100))
    weights = list(step.model.parameters())
    assert memory.weights == sum(value.nbytes for value in weights)
    assert memory.masters == sum(value.nbytes for value in masters if all(value is not weight for weight in weights))
    assert memory.gradients == sum(value.grad.nbytes for value in masters if value.grad is not None)
    assert all(weight.grad is None for weight in weights if weight.dtype == torch.bfloat16)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert memory.moments == sum(value.nbytes for value in moments)


def test_8_bit_moments_equal_the_tensors_except_the_small_ones():
    step = Step("float32", False, hidden_size=256)
    boot = make_boot("tiny", Path("nowhere"), optimizer_states="8bit")
    found = moments_of(make_optimizer(step.masters, boot), step.masters.tensors)
    large = {name: value.nbytes for name, value in found.items() if not name.endswith(("bias.state1", "bias.state2"))}
    memory = learner_memory(step.shape, workload(optimizer_states="8bit", dtype_bytes=4))
    assert memory.moments == pytest.approx(sum(large.values()), rel=0.01)


@pytest.mark.parametrize(("dtype", "lora"), SETTINGS)
def test_the_activations_of_a_layer_equal_the_formula(dtype, lora):
    def kept(num_tokens, num_layers):
        step = Step(dtype, lora)
        step.model.model.layers = step.model.model.layers[:num_layers]
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(value):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            output = step.forward(num_tokens)
        assert output.requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    def of_a_layer(num_tokens):
        return kept(num_tokens, 2) - kept(num_tokens, 1)

    step = Step(dtype, lora)
    assert of_a_layer(96) - of_a_layer(32) == 64 * layer_bytes_per_token(step.shape, step.workload(100))


@pytest.mark.parametrize(
    ("dtype", "lora", "recompute", "kept"),
    [
        ("float32", False, False, 0), ("float32", True, True, 0), ("bfloat16", True, False, 0),
        ("bfloat16", False, True, 0), ("bfloat16", False, True, 1), ("float32", True, True, 1),
    ],
)  # fmt: skip
def test_the_peak_of_a_step_is_near_the_allocated_memory(dtype, lora, recompute, kept):
    _compare_peak(Step(dtype, lora, recompute=recompute, layers_kept=kept, hidden_size=256), 512)


def test_the_peak_is_near_with_a_large_vocabulary(monkeypatch):
    """In real models the output head sets the peak of a short row."""
    monkeypatch.setattr(tiny_models, "EMBEDDING_ROWS", 8192)
    _compare_peak(Step("bfloat16", False, recompute=True, hidden_size=128), 128)


def _compare_peak(step: Step, num_tokens: int) -> None:
    step.run(num_tokens)  # its gradients remain, as those of an earlier micro-batch
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.run(num_tokens)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    memory = learner_memory(step.shape, step.workload(num_tokens))
    assert memory.activations + memory.work == pytest.approx(peak, rel=0.1)
    assert memory.context == HOST_PROCESS_BYTES
