"""Settings of the two workers from the memory plan, and the refusal of a model that does not fit.

    settings, manifest, shape --> GpuAssignments --> memory plans --> fits? --> WorkerPlacement --> workers' settings

A GPU's memory is a hard limit: a model that does not fit is refused before its load. Host memory is not a hard limit.
Its free part changes by the minute, the system may swap, and rules of thumb are most of a small model's estimate. So on
a CPU a plan that does not fit only gives a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import PARALLEL_SIZES
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.generation.engines import has_vllm
from ftis_node.learner.messages import HEAD_CHUNK_TOKENS
from ftis_node.memory.learner_memory import Workload
from ftis_node.memory.machine import USABLE_SHARE, Card, GpuAssignment, Machine, transfer_of
from ftis_node.memory.plan import MemoryPlan, plan
from ftis_node.models import ModelShape, ModelSource, list_accelerators, pick_device, read_shape
from ftis_node.models.accelerators import unusable_gpu, unused_gpu
from ftis_node.telemetry.host_memory import free_host_bytes
from ftis_node.telemetry.nvml import VISIBLE_GPUS
from ftis_node.telemetry.terminal_text import in_gib
from ftis_node.workers.weight_store import Transfer, free_in_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Placement of the workers. The defaults are those without a memory plan.

    `takes_turns`: the generator sleeps while the learner steps. `can_sleep`: it also frees its memory then.
    `memory_share` and `cache_bytes` are as in `EngineSettings`. `learner_share` is the fraction of its GPU that the
    learner's tensors may use, None for all. `transfer` is the transfer method of new weights. `recompute_activations`
    None: the setting decides. `shares_base`: the learner of an adapter maps the base that the engine holds;
    `copies_base`: it loads its own if it cannot. GPUs have their index in nvidia-smi; an empty tuple means all.
    """

    takes_turns: bool = False
    can_sleep: bool = False
    memory_share: float | None = None
    cache_bytes: int | None = None
    learner_share: float | None = None
    transfer: Transfer = "file"
    generator_gpus: tuple[int, ...] = ()
    learner_gpus: tuple[int, ...] = ()
    recompute_activations: bool | None = None
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS
    layers_kept: int = 0
    shares_base: bool = False
    copies_base: bool = False
    memory: str = field(default="", compare=False)

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of both workers; an empty tuple means all."""
        return tuple(sorted({*self.generator_gpus, *self.learner_gpus}))


def arrange(
    settings: NodeSettings, manifest: RunManifest, source: ModelSource, *, others_count: bool = True
) -> WorkerPlacement:
    """Return the placement on this machine; `others_count` as in `inspect_machine`. Raises as `place_workers_on`."""
    settings, machine = inspect_machine(settings, others_count=others_count)
    try:
        shape = read_shape(source)
    except ModelError as error:
        log.warning("no memory plan: %s; the engine takes its own defaults", error)
        shape = None
    return place_workers_on(machine, shape, settings, manifest)


def place_single_worker(settings: NodeSettings) -> WorkerPlacement:
    """Return the placement of a node's only worker, which gets all GPUs of the settings. Raises ConfigError."""
    of_generator, of_learner = settings.generation.gpus, settings.learner.gpus
    cards = inspect_cards(settings)
    if settings.gpus:
        first = tuple(range(usable_gpus(len(cards), settings)))
        of_generator, of_learner = of_generator or first, of_learner or first
    return WorkerPlacement(generator_gpus=of_generator, learner_gpus=of_learner)


def inspect_machine(settings: NodeSettings, *, others_count: bool = True) -> tuple[NodeSettings, Machine]:
    """Return the settings with this machine's engine in place of "auto", and the memory that the node may use.

    Without `others_count` the GPUs' memory that other programs use counts as free: they will have ended.
    Raises MachineError if the settings need a GPU and there is none, and for a GPU that cannot work.
    """
    if settings.engine == "auto":
        settings = settings.model_copy(update={"engine": "vllm" if has_vllm() else "torch"})
    cards = inspect_cards(settings)
    if not others_count:
        cards = tuple(replace(card, taken_bytes=0) for card in cards)
    return settings, Machine(cards, free_host_bytes(), free_in_memory())


def inspect_cards(settings: NodeSettings) -> tuple[Card, ...]:
    """Return the GPUs that the node sees; none with `--device cpu`. Raises as `inspect_machine` does."""
    if pick_device(settings.device) == "cpu":
        if settings.device == "auto" and (unused := unused_gpu()):
            log.warning("%s", unused)
        return ()
    found, is_float32 = list_accelerators(), settings.engine == "torch" and settings.dtype == "float32"
    named = {*settings.generation.gpus, *settings.learner.gpus}
    for gpu, each in enumerate(found):
        is_used = gpu in named if named else gpu < (settings.gpus or len(found))
        if is_used and (problem := unusable_gpu(each, is_float32=is_float32)):
            hide = f", or hide it by {VISIBLE_GPUS}" if len(found) > 1 else ""
            raise MachineError(f"GPU {gpu}, {problem}{hide}")
    return tuple(map(Card.of, found))


def place_workers_on(
    machine: Machine, shape: ModelShape | None, settings: NodeSettings, manifest: RunManifest
) -> WorkerPlacement:
    """Return the placement on any machine, without a plan if the shape is unknown. `engine` "auto" counts as vLLM.

    Raises MachineError if the model does not fit on a GPU, ConfigError for missing GPUs.
    """
    made, memory = None, ""
    if shape is None:
        assignment = assign_gpus(len(machine.cards), settings)
    else:
        made = plan_on(machine, shape, settings, manifest)
        assignment = made.gpus
        memory = _judge(made, settings, on_gpu=bool(assignment.learner))
    on_gpu, shares_gpu = bool(assignment.learner), assignment.are_shared
    by_vllm = bool(assignment.generator) and settings.engine != "torch"
    takes_turns = shares_gpu and _takes_turns(made, settings, gives_memory_back=by_vllm)
    serves_adapters = Workload.of(settings, manifest, on_gpu=on_gpu).adapter_served is not None
    transfer = transfer_of(settings, on_gpu=on_gpu, shares_gpu=shares_gpu, serves_adapters=serves_adapters)
    arrangement = WorkerPlacement(
        memory=memory, takes_turns=takes_turns, can_sleep=takes_turns and by_vllm, transfer=transfer
    )
    if len(machine.cards) > 1:  # even if the node may use only one of them
        arrangement = replace(arrangement, generator_gpus=assignment.generator, learner_gpus=assignment.learner)
    if made is not None and on_gpu and made.fits:
        arrangement = replace(
            arrangement,
            shares_base=made.shares_base,
            copies_base=settings.memory.check == "warn",
            recompute_activations=made.recompute_activations,
            head_chunk_tokens=made.head_chunk_tokens,
            layers_kept=made.layers_kept,
        )
    if made is None or made.gpu_memory_utilization is None:
        return arrangement
    return replace(
        arrangement,
        memory_share=min(made.gpu_memory_utilization, USABLE_SHARE),
        cache_bytes=made.kv_cache_bytes // len(assignment.generator),
        learner_share=None if takes_turns and made.placement == "shared" else made.learner_share,
    )


def plan_on(machine: Machine, shape: ModelShape, settings: NodeSettings, manifest: RunManifest) -> MemoryPlan:
    """Return the plan with each worker's GPUs. Raises ConfigError for missing GPUs.

    Of the assignments that fit, the one with the shortest estimated step is taken, and the first of equal ones. If none
    fits, it is the one that needs the smallest part of its cards.
    """
    candidates = assignments(machine.cards, settings)
    check_heads(shape, settings)
    plans = (
        replace(plan(shape, replace(machine, cards=gpus.cards_among(machine.cards)), settings, manifest), gpus=gpus)
        for gpus in candidates
    )
    return min(plans, key=lambda each: each.rank)


def assignments(cards: tuple[Card, ...], settings: NodeSettings) -> list[GpuAssignment]:
    """Return the assignment of `assign_gpus`; and if it gives each worker one GPU, all that differ, of one GPU or two.

    GPUs that the settings name are not exchanged.
    """
    first = assign_gpus(len(cards), settings)
    is_named = settings.generation.gpus or settings.learner.gpus
    if is_named or first.are_shared or len((*first.generator, *first.learner)) > 2:
        return [first]
    gpus = range(usable_gpus(len(cards), settings))
    unlike: dict[tuple[Card, ...], GpuAssignment] = {}
    for generator, learner in (*permutations(gpus, 2), *((gpu, gpu) for gpu in gpus)):
        kinds = (cards[generator],) if generator == learner else (cards[generator], cards[learner])
        unlike.setdefault(kinds, GpuAssignment((generator,), (learner,)))
    return list(unlike.values())


def assign_gpus(num_gpus: int, settings: NodeSettings) -> GpuAssignment:
    """Return the configured GPUs, else the first ones for the generator and the next for the learner.

    Both share one if there is no other and each asks for one. Raises ConfigError.
    """
    by_generator, by_learner = settings.generation.gpus, settings.learner.gpus
    num_gpus = usable_gpus(num_gpus, settings)
    for gpu in (*by_generator, *by_learner):
        if gpu >= num_gpus:
            raise ConfigError(f"generation.gpus and learner.gpus name GPU {gpu}: this node sees {num_gpus} GPUs")
    if num_gpus == 0:
        return GpuAssignment()
    num_parts = settings.num_generator_gpus
    generator = by_generator or _first(num_parts, num_gpus, but_for=by_learner)
    if len(set(generator)) != num_parts:
        has = f"generation.gpus names {len(set(generator))}" if by_generator else f"this node sees {num_gpus}"
        raise ConfigError(f"generation.engine_options ask for {num_parts} GPUs: {has}")
    num_ranks = settings.learner.num_ranks
    learner = by_learner or _first(num_ranks, num_gpus, but_for=generator)
    if len(learner) != num_ranks:
        raise ConfigError(f"learner.processes asks for {num_ranks} GPUs: this node sees {num_gpus}")
    if set(generator) & set(learner) and (num_parts > 1 or num_ranks > 1):
        raise ConfigError(
            f"a generator on {num_parts} and a learner on {num_ranks} GPUs cannot share one: "
            "give each its own (generation.gpus, learner.gpus)"
        )
    return GpuAssignment(generator, learner)


def usable_gpus(num_gpus: int, settings: NodeSettings) -> int:
    """Return how many of the visible GPUs the node may use. Raises ConfigError for GPUs that are missing."""
    if settings.gpus > num_gpus:
        seen = f"{num_gpus} GPUs" if num_gpus else "no GPU"
        raise ConfigError(
            f"--gpus {settings.gpus}: this node sees {seen} (`nvidia-smi -L` names them, {VISIBLE_GPUS} hides some)"
        )
    if num_gpus == 0 and settings.generates and settings.num_generator_gpus > 1:
        raise ConfigError(
            f"generation.engine_options ask for {settings.num_generator_gpus} GPUs: this node sees no GPU"
        )
    return settings.gpus or num_gpus


def check_heads(shape: ModelShape, settings: NodeSettings) -> None:
    """Raise ConfigError if vLLM cannot divide the model's attention heads, or its layers, among its GPUs."""
    number, num_stages = (settings.generation.engine_options.get(name, 1) for name in PARALLEL_SIZES)
    if settings.engine == "torch" or not settings.generates:
        return
    if num_stages > shape.num_layers:
        raise ConfigError(
            f"generation.engine_options.{PARALLEL_SIZES[1]} is {num_stages}: the model has {shape.num_layers} layers"
        )
    if shape.num_heads % number == 0:
        return
    good = [str(size) for size in range(1, shape.num_heads + 1) if shape.num_heads % size == 0]
    raise ConfigError(
        f"--tensor-parallel {number}: the model has {shape.num_heads} attention heads, which can be divided among "
        f"{', '.join(good)} GPUs"
    )


def visible_gpus(gpus: tuple[int, ...], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variable with which a worker sees only these of this process's GPUs; empty for all."""
    if not gpus:
        return {}
    seen = environment.get(VISIBLE_GPUS)
    names = seen.split(",") if seen else None
    return {VISIBLE_GPUS: ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)}


def _takes_turns(made: MemoryPlan | None, settings: NodeSettings, *, gives_memory_back: bool) -> bool:
    """Return whether workers on one device take turns: by the setting, else by the plan, else if it helps."""
    if settings.memory.placement != "auto":
        return settings.memory.placement == "time_shared"
    return gives_memory_back and (made is None or made.placement != "shared")


def _first(number: int, num_gpus: int, *, but_for: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first GPUs that the other worker does not have, then the other's."""
    free = [gpu for gpu in range(num_gpus) if gpu not in but_for]
    return tuple([*free, *but_for][:number])


def _judge(made: MemoryPlan, settings: NodeSettings, *, on_gpu: bool) -> str:
    """Return one line on the plan. Raises MachineError if it does not fit on a GPU, unless `memory.check` is "warn"."""
    needed, usable = in_gib(made.peak_bytes), in_gib(made.usable_bytes)
    if made.fits:
        base = ", one base for both workers" if made.shares_base and on_gpu else ""
        return f"{made.placement}: {needed} of {usable} at the peak, by the plan{made.bound}{base}"
    model = settings.model
    if not on_gpu:
        log.warning("memory may be short: %s seems to need %s, %s are free; %s", model, needed, usable, made.advice)
        return f"{needed} needed, {usable} free"
    line = f"{model} {made.refusal}: {needed} needed, {usable} usable{made.bound}; {made.advice}"
    if settings.memory.check == "refuse":
        raise MachineError(f'{line} (see `ftis-node doctor --model {model}`; memory.check = "warn" starts it anyway)')
    log.warning("%s", line)
    return f"{needed} needed, {usable} usable"
