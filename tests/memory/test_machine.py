"""What of a GPU's memory the plan may use: less what other programs use, at most the node's limit."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ftis_node.errors import MachineError
from ftis_node.memory import placement
from ftis_node.memory.machine import SPARE_BYTES, USABLE_SHARE, Card, GpuAssignment, Machine
from ftis_node.memory.placement import inspect_machine, place_workers_on, plan_on
from ftis_node.models import ModelSource
from ftis_node.models.accelerators import Accelerator
from tests.memory.planning import GIB, HALF_B, RUN, THREE_B, arranged, machine, planned, vllm_settings

SOURCE = ModelSource("m", Path("models/m"))


def card(gib: float, free_gib: float | None = None, name: str = "") -> Card:
    free = None if free_gib is None else int(free_gib * GIB)
    return Card.of(Accelerator(name, int(gib * GIB), free_bytes=free))


def on(*cards: Card, **changes: object) -> tuple[str, object]:
    """Return the line on the plan of 0.5B, and the placement."""
    made = place_workers_on(Machine(cards, 64 * GIB), HALF_B, vllm_settings(**changes), RUN)
    return made.memory, made


def test_usable_is_95_percent_of_the_card_and_at_most_what_others_leave_free():
    usual = int(USABLE_SHARE * 24 * GIB)
    assert card(24).usable_bytes == card(24, 24).usable_bytes == card(24, 23.9).usable_bytes == usual
    assert card(24, 23.9) == card(24), "the driver's own use makes no other card"
    assert card(24, 20).usable_bytes == 20 * GIB - SPARE_BYTES
    assert card(24, 0.1).usable_bytes == 0
    assert replace(card(24, 20), limit_bytes=12 * GIB).usable_bytes == 12 * GIB
    assert replace(card(24, 8), limit_bytes=12 * GIB).usable_bytes == 8 * GIB - SPARE_BYTES
    assert replace(card(24, 20), number=2).usable_bytes == 2 * card(24, 20).usable_bytes


def test_the_plan_starts_from_free_memory_and_names_what_others_use():
    full, partly = on(card(24)), on(card(24, 20))
    assert "other programs" not in full[0]
    assert partly[0].endswith(
        "of 19.70 GiB at the peak, by the plan (other programs use 4.00 GiB of the GPU's 24.00 GiB)"
    )
    with pytest.raises(MachineError, match="other programs use 18.00 GiB of the GPU's 24.00 GiB"):
        on(card(24, 6))


@pytest.mark.parametrize(("capability", "context_mib"), [((8, 6), 461), ((8, 9), 461), ((8, 0), 717), ((9, 0), 717)])
def test_3b_in_4_bits_fits_on_8_gb_beside_a_desktop_where_contexts_are_small(capability, context_mib):
    seen = Card.of(Accelerator("card", int(7.6 * GIB), capability, free_bytes=int(7.3 * GIB)))
    assert seen.context_bytes == context_mib << 20
    batches = {"generation": {"max_batch": 16}, "learner": {"micro_batch_tokens": 1024}}
    given = vllm_settings(quantize="4bit", lora=True, lora_adapter={"rank": 8}, **batches)
    made = plan_on(Machine((seen,), 64 * GIB), THREE_B, given, RUN)
    assert made.fits is (context_mib == 461)
    assert made.parts["learner: context"] == seen.context_bytes


def test_the_limit_bounds_both_workers():
    made = planned(HALF_B, 80, memory={"limit_gib": 16})
    assert (made.fits, made.usable_bytes) == (True, 16 * GIB)
    assert planned(HALF_B, 80).peak_bytes > 16 * GIB >= made.peak_bytes
    assert made.learner_share is not None and made.gpu_memory_utilization is not None
    assert (made.learner_share + made.gpu_memory_utilization) * 80 <= 16 + 0.2, "what torch and vLLM may take"
    line, _ = on(card(80), memory={"limit_gib": 16})
    assert line.endswith("of 16.00 GiB at the peak, by the plan (memory.limit_gib; the GPU has 80.00 GiB)")
    turns = arranged(THREE_B, 80, lora=True, memory={"limit_gib": 24, "placement": "time_shared"})
    assert turns.can_sleep and turns.learner_share is not None and 0.2 < turns.learner_share < 24 / 80
    apart = arranged(HALF_B, 80, 80, memory={"limit_gib": 16})
    assert apart.learner_share is not None and 0.18 < apart.learner_share < 16 / 80
    with pytest.raises(MachineError, match="memory.limit_gib"):
        arranged(HALF_B, 80, memory={"limit_gib": 4})


def test_of_two_unlike_cards_either_may_be_the_generators():
    for sizes, gpus in (((80, 24), ((1,), (0,))), ((24, 80), ((0,), (1,)))):
        made = arranged(THREE_B, *sizes, learner={"recompute_activations": True})
        assert (made.generator_gpus, made.learner_gpus) == gpus, "24 GiB do not fit the learner"
    quick, slow = card(24, name="RTX 4090"), card(24, name="RTX 3090")
    for cards in ((quick, slow), (slow, quick)):
        found = plan_on(Machine(cards, 64 * GIB), HALF_B, vllm_settings(), RUN)
        assert cards[found.gpus.learner[0]] == quick
    named = plan_on(Machine((slow, quick), 64 * GIB), HALF_B, vllm_settings(learner={"gpus": [0]}), RUN)
    assert named.gpus == GpuAssignment((1,), (0,))
    equal = plan_on(machine(24, 24), HALF_B, vllm_settings(), RUN)
    assert equal.gpus == GpuAssignment((0,), (1,))


@pytest.mark.parametrize(("sizes", "gpu"), [((22, 11.6), 0), ((11.6, 22), 1)])
def test_one_card_has_both_workers_if_a_small_second_one_makes_steps_longer(sizes, gpu):
    given = vllm_settings(lora=True, generation={"max_batch": 256})
    alone = plan_on(machine(*sizes), THREE_B, given, RUN)
    assert (alone.placement, alone.gpus) == ("time_shared", GpuAssignment((gpu,), (gpu,)))
    assert alone.step_s < planned(THREE_B, 11.6, 22, lora=True, generation={"max_batch": 256}).step_s
    placed = place_workers_on(machine(*sizes), THREE_B, given, RUN)
    assert (placed.generator_gpus, placed.learner_gpus, placed.takes_turns) == ((gpu,), (gpu,), True)


def test_of_three_cards_the_best_two_are_taken():
    cards = (card(12, name="RTX 3060"), card(24, name="RTX 3090"), card(24, name="RTX 4090"))
    found = plan_on(Machine(cards, 64 * GIB), HALF_B, vllm_settings(), RUN)
    assert found.gpus.learner == (2,)
    full = card(24, free_gib=0, name="RTX 4090")
    assert plan_on(Machine((*cards[:2], full), 64 * GIB), HALF_B, vllm_settings(), RUN).gpus.learner == (1,)


def test_the_memory_of_other_programs_does_not_count_for_a_node_that_starts_paused(monkeypatch):
    """A game uses the GPU now; the workers start after its end."""
    seen = [Accelerator("NVIDIA L4", 22 * GIB, (8, 9), free_bytes=2 * GIB)]
    monkeypatch.setattr(placement, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(placement, "list_accelerators", lambda: seen)
    monkeypatch.setattr(placement, "read_shape", lambda source: HALF_B)
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 64 * GIB)
    with pytest.raises(MachineError, match="other programs use 20.00 GiB"):
        placement.arrange(vllm_settings(), RUN, SOURCE)
    arranged_paused = placement.arrange(vllm_settings(), RUN, SOURCE, others_count=False)
    empty = Card.of(seen[0]._replace(free_bytes=None))
    assert arranged_paused == place_workers_on(Machine((empty,), 64 * GIB), HALF_B, vllm_settings(), RUN)


def test_gpus_that_cannot_work_are_refused_or_hidden(monkeypatch, caplog):
    seen = [Accelerator("NVIDIA L4", 22 * GIB, (8, 9)), Accelerator("Tesla T4", 15 * GIB, (7, 5))]
    monkeypatch.setattr(placement, "pick_device", lambda device: "cuda" if seen and device != "cpu" else "cpu")
    monkeypatch.setattr(placement, "list_accelerators", lambda: seen)
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 64 * GIB)
    with pytest.raises(MachineError, match="GPU 1, Tesla T4 has compute capability 7.5.*or hide it by CUDA_VISIBLE"):
        inspect_machine(vllm_settings())
    for accepted in ({"gpus": 1}, {"generation": {"gpus": [0]}, "learner": {"gpus": [0]}}):
        assert len(inspect_machine(vllm_settings(**accepted))[1].cards) == 2
    assert inspect_machine(vllm_settings(engine="torch", dtype="float32"))[1].cards[1] == card(15, name="Tesla T4")
    assert inspect_machine(vllm_settings(device="cpu"))[1].cards == ()
    seen.clear()
    monkeypatch.setattr(placement, "unused_gpu", lambda: "the AMD GPU is not used")
    with caplog.at_level(logging.WARNING):
        assert inspect_machine(vllm_settings())[1].cards == ()
    assert caplog.messages == ["the AMD GPU is not used"]
