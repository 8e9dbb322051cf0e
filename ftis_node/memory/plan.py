"""Placement plan of the two workers, made before any model is loaded.

    cpu           no GPU: both in host memory, the node's own process beside them
    shared        both stay on one GPU; the generator takes a fixed share of it
    time_shared   they take turns on one GPU: the generator gives its memory back while the learner steps
    dedicated     two GPUs or more: the generator on the first, the learner on the next, or on as many as it asks for
    does_not_fit  `advice` says what would

One GPU is shared or the workers take turns, whichever fits and has the shorter step (`step_time.py`). If nothing fits
with two copies of an adapter's base, the learner of a shared GPU maps the engine's, which no GPU has tested yet. Below
one group's cache no placement works. While the generator is awake, the learner's weights and moments stay in place.
While it sleeps, its context and graphs stay. Options that trade memory for speed come last, from the memory that is
left (`_with_speed`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor
from typing import Literal, TypeAlias

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.learner.messages import HEAD_CHUNK_TOKENS
from ftis_node.memory.generator import GeneratorMemory, generator_memory, host_memory
from ftis_node.memory.learner_memory import (
    GPU_HEAD_CHUNK_TOKENS,
    HOST_PROCESS_BYTES,
    LearnerMemory,
    Workload,
    learner_memory,
    mappable_base,
    shares_base,
)
from ftis_node.memory.machine import USABLE_SHARE, Card, GpuAssignment, Machine
from ftis_node.memory.ranks import memory_per_rank
from ftis_node.memory.step_time import generator_seconds, learner_seconds
from ftis_node.memory.suggestions import suggest_change
from ftis_node.models import ModelShape
from ftis_node.telemetry.terminal_text import in_gib
from ftis_node.workers.weight_store import VERSIONS_AT_ONCE, VERSIONS_KEPT, has_space

Placement: TypeAlias = Literal["cpu", "shared", "time_shared", "dedicated", "does_not_fit"]
WEIGHT_SYNC = "weight sync"
BASE, SHARED_BASE = "generator: weights", "shared base: weights of both workers"
HOST_BOUND = " (beside the weights of a sleeping generator)"
SPEED_SHARE = 0.9  # of the usable memory, up to which options for speed may raise the learner's peak


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory plan. `peak_bytes` is of the fuller device (the least that would do), `usable_bytes` its limit, and
    `bound` says what lowers that limit.

    `kv_cache_bytes` is the generator's cache. `gpu_memory_utilization` is the share of its GPU for weights, adapters
    and cache; None if no GPU is planned for. `learner_share` is the part of its GPU that is left to the learner's
    tensors, in `shared` and if `memory.limit_gib` bounds it, else None. `learner_fill` is the part of the usable memory
    of its GPU that both workers use at the learner's peak. `parts` names every part, in bytes. The weight sync comes
    after a step and is not on top of it. `host_bytes` is the host memory that the workers need beside a GPU.
    `keeping_bytes` is the peak with kept activations, None if the setting decides. `step_s` is the expected time of a
    step with GPUs, else 0. `change` is a change of settings with which a model that does not fit would fit, "" if there
    is none. `gpus` are those of each worker. `shares_base`: an adapter's base is in memory once.
    """

    placement: Placement
    fits: bool
    peak_bytes: int
    usable_bytes: int
    kv_cache_bytes: int
    gpu_memory_utilization: float | None
    parts: dict[str, int]
    host_bytes: int
    change: str = ""
    bound: str = ""
    step_s: float = 0.0
    learner_share: float | None = None
    learner_fill: float = 0.0
    recompute_activations: bool = False
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS
    layers_kept: int = 0
    num_layers: int = 0
    keeping_bytes: int | None = None
    without_speed_bytes: int | None = None
    gpus: GpuAssignment = GpuAssignment()
    shares_base: bool = False

    @property
    def needed_bytes(self) -> int:
        """Peak without the options that only use spare memory for speed."""
        return self.peak_bytes if self.without_speed_bytes is None else self.without_speed_bytes

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Return the sort key of plans, the best first: those that fit by their step, others by what they exceed.

        One base for both workers comes after all plans that fit with two.
        """
        if self.fits:
            return False, self.shares_base, self.step_s
        return True, False, self.peak_bytes / max(1, self.usable_bytes)

    @property
    def refusal(self) -> str:
        return "does not fit in the host's memory" if self.bound == HOST_BOUND else "does not fit on the GPU"

    @property
    def advice(self) -> str:
        """What to do if the model does not fit."""
        return f"{self.change} would suffice" if self.change else "use a smaller model or a larger device"

    @property
    def activations(self) -> str:
        """Whether activations are kept or recomputed, and why."""
        if not self.recompute_activations:
            return "activations are kept"
        if self.keeping_bytes is None:
            return "activations are recomputed, as set"
        if self.layers_kept:
            kept = f"{self.layers_kept} of {self.num_layers} layers"
            return f"activations are kept in {kept} (in all they need {in_gib(self.keeping_bytes)})"
        return f"activations are recomputed (keeping them needs {in_gib(self.keeping_bytes)})"


def plan(shape: ModelShape, machine: Machine, settings: NodeSettings, manifest: RunManifest) -> MemoryPlan:
    """Return the plan for a model on the one or two cards of `machine`, the generator's first; without, on the CPU."""
    machine = replace(machine, cards=()) if settings.device == "cpu" else machine.limited_by(settings)
    workload = Workload.of(settings, manifest, on_gpu=bool(machine.cards))
    context_bytes = max((card.context_bytes for card in machine.cards), default=0)
    workload = replace(workload, context_bytes=context_bytes)
    made = _place(shape, machine, workload)
    if made.fits:
        place = partial(_place, shape, machine)
        return _with_speed(made, workload, place, settings, shape.num_layers) if workload.on_gpu else made

    def excess(changed: Workload) -> int:
        found = _place(shape, machine, changed)
        return found.peak_bytes - found.usable_bytes

    workload = replace(workload, can_quantize=workload.can_quantize and shape.experts is None)
    return replace(made, change=suggest_change(workload, excess))


def _with_speed(
    made: MemoryPlan,
    workload: Workload,
    place: Callable[[Workload], MemoryPlan],
    settings: NodeSettings,
    num_layers: int,
) -> MemoryPlan:
    """Return the fastest learner that fits: `made` itself, or one that fills its GPU up to SPEED_SHARE.

    All layers keep their activations if they fit, else the last ones as far as there is space.
    """
    chunks = (GPU_HEAD_CHUNK_TOKENS, GPU_HEAD_CHUNK_TOKENS // 2, HEAD_CHUNK_TOKENS)
    keeping_bytes = None

    def if_roomy(changed: Workload) -> MemoryPlan | None:
        faster = place(changed)
        is_roomy = faster.learner_fill <= max(made.learner_fill, SPEED_SHARE)
        same = [(each.placement, each.kv_cache_bytes, each.shares_base) for each in (faster, made)]
        return faster if faster.fits and same[0] == same[1] and is_roomy else None

    def with_most_layers(changed: Workload) -> Workload:
        numbers = [replace(changed, layers_kept=number) for number in range(1, num_layers)]
        return [changed, *numbers][bisect_left(numbers, True, key=lambda each: if_roomy(each) is None)]

    variants = [replace(workload, head_chunk_tokens=chunk) for chunk in chunks]
    if settings.learner.recompute_activations is None and workload.learner_ranks == 1:  # several cannot change back
        kept = [replace(variant, recompute_activations=False) for variant in variants]
        keeping_bytes = place(kept[-1]).peak_bytes
        variants = [*kept, *map(with_most_layers, variants)]
    for faster in map(if_roomy, variants):
        if faster is not None:
            return replace(faster, keeping_bytes=keeping_bytes, without_speed_bytes=made.peak_bytes)
    return replace(made, keeping_bytes=keeping_bytes)


def _place(shape: ModelShape, machine: Machine, workload: Workload) -> MemoryPlan:
    if len(machine.cards) > 1:
        workload = replace(workload, maps_weights=False)
    generator = generator_memory(shape, workload)
    learner = memory_per_rank(learner_memory(shape, workload), shape, workload)
    host_bytes = host_memory(shape, workload)
    if not machine.cards:
        made = _on_cpu(generator, learner, machine)
        plans = [_with_one_base(made) if shares_base(shape, workload) else made]
    elif len(machine.cards) > 1:
        plans = [_separate(generator, learner, machine.cards, host_bytes)]
    else:
        plans = _on_one_gpu(generator, learner, machine, host_bytes, workload)
        if (base := mappable_base(shape, workload)) and not workload.must_sleep:
            learner = replace(learner, weights=learner.weights - base)
            split, *_ = _on_one_gpu(generator, learner, machine, host_bytes, workload)
            plans.append(_with_one_base(split))
    timed = (replace(each, step_s=_step_seconds(shape, workload, machine.cards, each)) for each in plans)
    return replace(
        min(timed, key=lambda each: each.rank),
        recompute_activations=workload.recompute_activations,
        head_chunk_tokens=workload.head_chunk_tokens,
        layers_kept=workload.layers_kept,
        num_layers=shape.num_layers,
    )


def _with_one_base(made: MemoryPlan) -> MemoryPlan:
    parts = {SHARED_BASE if name == BASE else name: num_bytes for name, num_bytes in made.parts.items()}
    return replace(made, shares_base=True, parts=parts)


def _step_seconds(shape: ModelShape, workload: Workload, cards: tuple[Card, ...], made: MemoryPlan) -> float:
    if not cards or not made.fits:
        return 0.0
    takes_turns = made.placement == "time_shared"
    generating_s = generator_seconds(
        shape, workload, cards[0], cache_bytes=made.kv_cache_bytes, takes_turns=takes_turns
    )
    learning_s = learner_seconds(shape, workload, cards[-1])
    return max(generating_s, learning_s) if len(cards) > 1 else generating_s + learning_s


def _on_cpu(generator: GeneratorMemory, learner: LearnerMemory, machine: Machine) -> MemoryPlan:
    """Return the plan for the CPU. Published versions take memory only in /dev/shm, if it can hold them."""
    usable, version = int(USABLE_SHARE * machine.host_bytes), learner.weight_sync
    in_memory = has_space(VERSIONS_AT_ONCE * version, machine.memory_disk_bytes)
    learner = replace(learner, weight_sync=0)
    published = VERSIONS_KEPT * version if in_memory else 0
    fixed = HOST_PROCESS_BYTES + generator.fixed + learner.peak + published
    cache = _cache_within(generator, usable - fixed)
    fits = fixed + cache <= usable
    parts = {"the node's process": HOST_PROCESS_BYTES} | _parts(generator, learner, cache)
    parts["published weights in /dev/shm"] = published
    return MemoryPlan("cpu" if fits else "does_not_fit", fits, fixed + cache, usable, cache, None, parts, fixed + cache)


def _separate(
    generator: GeneratorMemory, learner: LearnerMemory, cards: tuple[Card, ...], host_bytes: int
) -> MemoryPlan:
    usable = tuple(card.usable_bytes for card in cards)
    cache = _cache_within(generator, usable[0] - generator.fixed)
    peaks = (generator.fixed + cache, learner.peak)
    fits = peaks[0] <= usable[0] and peaks[1] <= usable[1]
    fuller = max((0, 1), key=lambda device: peaks[device] / max(1, usable[device]))
    return MemoryPlan(
        placement="dedicated" if fits else "does_not_fit",
        fits=fits,
        peak_bytes=peaks[fuller],
        usable_bytes=usable[fuller],
        kv_cache_bytes=cache,
        gpu_memory_utilization=_utilization(generator, cache, cards[0]),
        parts=_parts(generator, learner, cache),
        host_bytes=host_bytes,
        bound=cards[fuller].bound,
        learner_share=_learner_share(cards[1], usable[1] - learner.context) if cards[1].limit_bytes else None,
        learner_fill=learner.peak / max(1, usable[1]),
    )


def _on_one_gpu(
    generator: GeneratorMemory, learner: LearnerMemory, machine: Machine, host_bytes: int, workload: Workload
) -> list[MemoryPlan]:
    """Return the plans of both placements that the settings allow."""
    card, usable = machine.cards[0], machine.cards[0].usable_bytes

    def made(placement: Placement, cache: int, learning: int, awake: int = 0) -> MemoryPlan:
        peak_bytes = max(learning, awake)
        fits = peak_bytes <= usable
        utilization = _utilization(generator, cache, card)
        parts = _parts(generator, learner, cache)
        where = placement if fits else "does_not_fit"
        room = usable - learner.context - (generator.fixed + cache if placement == "shared" else generator.asleep)
        share = _learner_share(card, room) if fits and (placement == "shared" or card.limit_bytes) else None
        return MemoryPlan(
            *(where, fits, peak_bytes, usable, cache, utilization, parts, host_bytes),
            bound=card.bound,
            learner_share=share,
            learner_fill=learning / max(1, usable),
        )

    together = generator.fixed + max(learner.peak, learner.resident + learner.weight_sync + generator.staging)
    cache = _cache_within(generator, usable - together)
    split = made("shared", cache, together + cache)
    if not workload.can_sleep:
        return [split]
    generator = generator.in_turns
    awake = learner.resident + generator.fixed
    cache = _cache_within(generator, usable - awake)
    loading = learner.resident + generator.fixed + generator.staging  # the cache comes after the weights
    turns = made("time_shared", cache, learner.peak + generator.asleep, max(awake + cache, loading))
    turns = _within_host(replace(turns, host_bytes=host_bytes + generator.on_host), machine)
    return [turns] if workload.must_sleep else [split, turns]


def _within_host(made: MemoryPlan, machine: Machine) -> MemoryPlan:
    """Return the plan, which does not fit if the host lacks memory for it."""
    usable = int(USABLE_SHARE * machine.host_bytes)
    if not made.fits or made.host_bytes <= usable:
        return made
    made = replace(made, placement="does_not_fit", fits=False, learner_share=None)
    return replace(made, peak_bytes=made.host_bytes, usable_bytes=usable, bound=HOST_BOUND)


def _cache_within(generator: GeneratorMemory, room: int) -> int:
    """Return the cache for all completions, or as much of it as fits, at least that of one group."""
    return max(generator.smallest_cache, min(generator.cache, room))


def _utilization(generator: GeneratorMemory, cache: int, card: Card) -> float:
    """Return the share rounded up to a thousandth, at most 1. vLLM demands it of what is free beside its context."""
    return min(1.0, ceil(1000 * (generator.fixed - generator.workspace + cache) / card.total_bytes) / 1000)


def _learner_share(card: Card, room: int) -> float:
    return floor(1000 * room / card.memory_bytes) / 1000


def _parts(generator: GeneratorMemory, learner: LearnerMemory, cache: int) -> dict[str, int]:
    return {
        BASE: generator.weights,
        "generator: key/value cache": cache,
        "generator: places for adapters": generator.adapters,
        "generator: workspace and context": generator.workspace,
        "learner: weights": learner.weights,
        "learner: starting model": learner.start,
        "learner: float32 masters": learner.masters,
        "learner: Adam's moments": learner.moments,
        "learner: context": learner.context,
        "learner: gradients": learner.gradients,
        "learner: activations": learner.activations,
        "learner: logits and work space": learner.work,
        WEIGHT_SYNC: learner.weight_sync,
    }
