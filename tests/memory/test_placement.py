"""What `join` makes of the memory plan on machines that people have: turns, shares, GPUs, refusals."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.generation.engines.vllm_options import engine_arguments
from ftis_node.memory import placement
from ftis_node.memory.placement import Arrangement, Seats, arrange, arrange_on, find_seats, visible_gpus
from ftis_node.memory.plan import USABLE_SHARE, Machine, plan
from ftis_node.memory.suggestions import Change
from ftis_node.models import ModelSource, shape_of
from ftis_node.node.startup.factories import generation_boot, learner_boot
from tests.models.test_model_shape import QWEN_05B, QWEN_3B

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.models import ModelShape

GIB = 1 << 30
HALF_B, THREE_B = shape_of(QWEN_05B), shape_of(QWEN_3B)
RUN = load_manifest("gsm8k-ftis")
HOST_BYTES = 64 * GIB


def settings(**changes: Any) -> NodeSettings:
    """128 completions side by side, by vLLM."""
    generation = {"max_batch": 128} | changes.pop("generation", {})
    return NodeSettings.model_validate({"model": "m", "engine": "vllm", "generation": generation} | changes)


def arranged(shape: ModelShape | None, *gpus_gib: float, **changes: Any) -> Arrangement:
    machine = Machine(tuple(int(gib * GIB) for gib in gpus_gib), HOST_BYTES)
    return arrange_on(machine, shape, settings(**changes), RUN)


def planned(shape: ModelShape, *gpus_gib: float, **changes: Any) -> Any:
    return plan(shape, [int(gib * GIB) for gib in gpus_gib], settings(**changes), RUN, host_bytes=HOST_BYTES)


def test_a_split_gives_the_engine_the_plans_share_and_cache() -> None:
    made = planned(HALF_B, 24)
    assert made.placement == "split"
    assert arranged(HALF_B, 24) == Arrangement(
        memory_share=made.gpu_memory_utilization,
        cache_bytes=made.kv_cache_bytes,
        learner_share=made.learner_share,
    )


def test_in_a_split_the_learner_s_tensors_keep_to_what_the_engine_leaves() -> None:
    made = planned(HALF_B, 24)
    of_generator = sum(value for name, value in made.parts.items() if name.startswith("generator"))
    assert made.learner_share is not None
    room = made.usable_bytes - of_generator - made.parts["learner: context"]
    assert 0 <= room - made.learner_share * 24 * GIB < 0.001 * 24 * GIB
    assert made.learner_share * 24 * GIB >= made.peak_bytes - of_generator - made.parts["learner: context"]
    for other in (planned(THREE_B, 24, lora=True), planned(HALF_B, 24, 24), planned(HALF_B), planned(THREE_B, 4)):
        assert (other.placement != "split", other.learner_share) == (True, None)
    assert arranged(HALF_B, 24, generation={"memory_share": 0.4}).learner_share is None
    assert arranged(HALF_B, 24, memory={"placement": "sleep"}).learner_share is None


def test_where_both_do_not_fit_they_take_turns() -> None:
    made = planned(THREE_B, 24, lora=True)
    assert made.placement == "sleep"
    assert arranged(THREE_B, 24, lora=True) == Arrangement(
        takes_turns=True,
        can_sleep=True,
        memory_share=made.gpu_memory_utilization,
        cache_bytes=made.kv_cache_bytes,
    )


@pytest.mark.parametrize(
    ("engine", "placement", "gpus_gib", "takes_turns", "can_sleep"),
    [
        ("vllm", "sleep", (24,), True, True),
        ("vllm", "split", (24,), False, False),
        ("torch", "auto", (24,), False, False),
        ("torch", "sleep", (24,), True, False),
        ("vllm", "auto", (), False, False),
        ("vllm", "sleep", (), True, False),
        ("vllm", "sleep", (24, 24), False, False),
    ],
)
def test_the_setting_goes_before_the_plan_on_one_device(
    engine: str, placement: str, gpus_gib: tuple[float, ...], takes_turns: bool, can_sleep: bool
) -> None:
    made = arranged(HALF_B, *gpus_gib, engine=engine, memory={"placement": placement})
    assert (made.takes_turns, made.can_sleep) == (takes_turns, can_sleep)


def test_the_plan_follows_the_setting() -> None:
    assert planned(HALF_B, 24, memory={"placement": "sleep"}).placement == "sleep"
    assert planned(THREE_B, 24, lora=True, memory={"placement": "split"}).placement == "none"


def test_two_gpus_are_one_each_unless_configured() -> None:
    first = arranged(HALF_B, 80, 24)
    assert (first.generator_gpus, first.learner_gpus, first.takes_turns) == ((0,), (1,), False)
    swapped = arranged(HALF_B, 80, 24, learner={"gpus": [0]})
    assert (swapped.generator_gpus, swapped.learner_gpus) == ((1,), (0,))
    assert swapped.memory_share == planned(HALF_B, 24, 80).gpu_memory_utilization
    shared = arranged(THREE_B, 80, 24, lora=True, generation={"gpus": [1]}, learner={"gpus": [1]})
    assert (shared.generator_gpus, shared.learner_gpus, shared.takes_turns) == ((1,), (1,), True)
    assert shared.cache_bytes == planned(THREE_B, 24, lora=True).kv_cache_bytes


def test_a_generator_on_two_gpus_halves_its_cache() -> None:
    made = arranged(THREE_B, 24, 24, 80, generation={"engine_options": {"tensor_parallel_size": 2}})
    whole = planned(THREE_B, 48, 80)
    assert made == Arrangement(
        memory_share=whole.gpu_memory_utilization,
        cache_bytes=whole.kv_cache_bytes // 2,
        generator_gpus=(0, 1),
        learner_gpus=(2,),
    )


@pytest.mark.parametrize(
    ("num_gpus", "changes", "problem"),
    [
        (1, {"generation": {"gpus": [1]}}, "name GPU 1: this node sees 1 GPUs"),
        (0, {"learner": {"gpus": [0]}}, "name GPU 0: this node sees 0 GPUs"),
        (2, {"generation": {"engine_options": {"tensor_parallel_size": 4}}}, "ask for 4 GPUs: this node sees 2"),
        (2, {"generation": {"gpus": [0, 1]}}, "ask for 1 GPUs: generation.gpus names 2"),
        (
            2,
            {"generation": {"engine_options": {"tensor_parallel_size": 2}}},
            "on 2 and a learner on 1 GPUs cannot share",
        ),
        (2, {"learner": {"processes": 2}}, "on 1 and a learner on 2 GPUs cannot share one"),
        (
            2,
            {"learner": {"gpus": [0, 1]}, "generation": {"gpus": [1]}},
            "on 1 and a learner on 2 GPUs cannot share one",
        ),
        (2, {"learner": {"processes": 3}}, "learner.processes asks for 3 GPUs: this node sees 2"),
    ],
)
def test_gpus_that_cannot_be_had_are_refused(num_gpus: int, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_seats(num_gpus, settings(**changes))


def test_a_learner_on_two_gpus_holds_half_of_its_weights_on_each() -> None:
    small = {"micro_batch_tokens": 2048, "recompute_activations": True}
    made = arranged(THREE_B, 80, 40, 40, learner={"processes": 2, **small})
    assert (made.generator_gpus, made.learner_gpus, made.takes_turns) == ((0,), (1, 2), False)
    assert find_seats(3, settings(learner={"gpus": [0, 2]})) == Seats((1,), (0, 2))
    alone, together = (
        planned(THREE_B, 80, 40, learner=small),
        planned(THREE_B, 80, 40, learner=small | {"processes": 2}),
    )
    assert (alone.fits, together.fits) == (False, True)
    for part in ("learner: weights", "learner: Adam's moments"):
        assert together.parts[part] == alone.parts[part] / 2
    # Gathered: embedding (tied) and two of 36 layers, in bfloat16; a gradient of the larger, in both formats.
    root = THREE_B.embedding_parameters
    layer = -(-(THREE_B.num_parameters - root) // 36)
    gathered = together.parts["learner: logits and work space"] - alone.parts["learner: logits and work space"]
    assert gathered == 2 * (root + 2 * layer)
    assert together.parts["learner: gradients"] == alone.parts["learner: gradients"] / 2 + 6 * max(root, layer)


def test_a_plan_for_one_gpu_seats_both_there() -> None:
    assert find_seats(1, settings()) == Seats((0,), (0,))


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(MachineError) as refused:
        arranged(THREE_B, 24)
    line = str(refused.value)
    made = planned(THREE_B, 24)
    assert f"{made.peak_bytes / GIB:.2f} GiB needed, {made.usable_bytes / GIB:.2f} GiB usable" in line
    assert "--lora (rank 128) would do" in line
    assert refused.value.exit_code == 3
    assert "\n" not in line


def test_where_nothing_would_do_the_line_says_so() -> None:
    with pytest.raises(MachineError, match="take a smaller model or a larger device"):
        arranged(THREE_B, 4)


def test_a_warning_goes_on_with_turns_and_a_share_that_can_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = arranged(THREE_B, 4, memory={"check": "warn"})
    assert [record.message for record in caplog.records][0].startswith("m does not fit on the GPU")
    assert (made.takes_turns, made.can_sleep, made.memory_share) == (True, True, USABLE_SHARE)


def test_host_memory_that_looks_short_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = arrange_on(Machine((), GIB // 2), HALF_B, settings(), RUN)
    assert made == Arrangement()
    assert "memory may be short: m seems to need" in caplog.text


def test_without_a_shape_there_is_no_plan_and_the_engine_has_its_own_defaults() -> None:
    assert arranged(None, 24) == Arrangement(takes_turns=True, can_sleep=True)
    assert arranged(None, 24, 24) == Arrangement(generator_gpus=(0,), learner_gpus=(1,))


def test_a_share_that_was_set_leaves_the_cache_to_vllm() -> None:
    made = arranged(HALF_B, 24, generation={"memory_share": 0.4})
    assert (made.memory_share, made.cache_bytes) == (0.4, None)


def test_what_a_worker_sees_is_named_as_this_process_sees_it() -> None:
    assert visible_gpus((), {"CUDA_VISIBLE_DEVICES": "3"}) == {}
    assert visible_gpus((1, 0), {}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert visible_gpus((1,), {"CUDA_VISIBLE_DEVICES": "2, GPU-7"}) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}


def test_the_machine_is_looked_at_and_a_shape_that_cannot_be_read_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(source: Any) -> Any:
        raise ModelError("config.json describes a mixture of experts: its memory cannot be planned")

    monkeypatch.setattr(placement, "read_shape", unreadable)
    monkeypatch.setattr(placement, "pick_device", lambda device: "cpu")
    with caplog.at_level(logging.WARNING):
        assert arrange(settings(engine="auto"), RUN, source=None) == Arrangement()  # type: ignore[arg-type]
    assert "mixture of experts" in caplog.text


def test_the_boots_have_what_was_arranged(tmp_path: Path) -> None:
    made = Arrangement(takes_turns=True, can_sleep=True, memory_share=0.5, cache_bytes=GIB, learner_share=0.25)
    source = ModelSource(name="m", folder=tmp_path)
    tokenizer: Any = SimpleNamespace(eos_ids=(1,), vocab_size=90)
    boot = generation_boot(settings(device="cpu"), RUN, source, tokenizer, made)
    arguments = engine_arguments(source, boot.settings, device="cuda", seed=0)
    assert (arguments["gpu_memory_utilization"], arguments["kv_cache_memory_bytes"]) == (0.5, GIB)
    assert arguments["enable_sleep_mode"] is True
    assert engine_arguments(source, boot.settings, device="cpu", seed=0)["enable_sleep_mode"] is False
    learning = learner_boot(settings(device="cpu"), RUN, source, Home(tmp_path), made, weights=tmp_path)
    assert (learning.takes_turns, learning.memory_share) == (True, 0.25)


def test_the_first_change_that_fits_is_the_advice() -> None:
    changes = (
        Change("learner.optimizer_states = 8bit", "none", peak_bytes=1, fits=False),
        Change("dtype = bfloat16", "split", peak_bytes=1, fits=True),
    )
    assert placement._advice(replace(planned(THREE_B, 24), changes=changes)) == "dtype = bfloat16 would do"
