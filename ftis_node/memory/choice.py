"""Choice of what a node trains if neither `--full` nor `--lora` is given, among the options that fit.

    all weights -> with 8-bit optimizer states -> with optimizer states in host memory
    -> a LoRA adapter of the rank that is set -> with smaller batches -> of smaller ranks with still smaller batches

The one with the shortest expected step is taken (`step_time.py`). An earlier option of this order stays if its step is
only a little longer. All weights can learn more than an adapter, float32 states are exact, and the estimate is rough.
An adapter stays unless another of its rank has a shorter step.

A home keeps its first choice; later starts choose only the batches and the place of float32 states again. Without a
GPU no choice is made and all weights are trained: host memory is not a hard limit (`placement.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import FileError, MachineError, ModelError, how_to_install
from ftis_node.files import read_object
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH
from ftis_node.memory.learner_memory import GPU_MICRO_BATCH_TOKENS
from ftis_node.memory.machine import USABLE_SHARE, Machine
from ftis_node.memory.placement import inspect_machine, plan_on
from ftis_node.memory.plan import MemoryPlan
from ftis_node.models import ModelShape, ModelSource, published_qwen25, read_shape
from ftis_node.telemetry.terminal_text import in_gib
from ftis_node.workers.durable import CHECKPOINT_PREFIX, STATE_FILE, newest_complete

DEFAULT_RUN = "gsm8k-ftis"
MIN_RANK = 8
# Divisors of the rank, of the completions side by side and of the positions of a micro-batch. Each is a maximum, halved
# or quartered from one row to the next. A smaller batch costs only time, a smaller rank reduces what can be learned.
SMALLER_ADAPTERS = ((1, 64, 4096), (4, 32, 2048), (16, 16, 1024))
ALL_WEIGHTS = "all weights"
STATES_GAIN, ADAPTER_GAIN = 0.85, 0.75  # of the step before: a longer one does not replace it
AS_BEGUN, AS_QUANTIZED = ", as this home began", ", as asked (--quantize 4bit)"
ADAPTER = re.compile(r"LoRA of rank (\d{1,5}), alpha (\d{1,5}),")  # names as in learner/checkpoint/checkpoint.py


@dataclass(frozen=True, slots=True)
class PreviousTraining:
    """What a home trains. `optimizer_states` is that of the settings of its last start, "" if unknown."""

    lora: bool
    rank: int = 0
    alpha: int = 0
    optimizer_states: str = ""


def read_previous_training(home: Home, model: str) -> PreviousTraining | None:
    """Return what the home has begun to train, None if nothing: by its newest checkpoint, else by its last settings."""
    try:
        last = read_object(home.settings)
        of_last = PreviousTraining(
            lora=last["lora"],
            rank=int(last["lora_adapter"]["rank"]),
            alpha=int(last["lora_adapter"]["alpha"]),
            optimizer_states=str(last["learner"]["optimizer_states"]),
        )
    except (OSError, FileError, KeyError, TypeError, ValueError):
        last, of_last = {}, None
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    trains = "" if newest is None else str(checkpoint_owner(newest / STATE_FILE).get("trains", ""))
    if not trains:
        is_same = last.get("model") == model and last.get("role") not in ("generator", "exchange")
        return of_last if is_same and of_last is not None and isinstance(of_last.lora, bool) else None
    states = of_last.optimizer_states if of_last is not None else ""
    if (adapter := ADAPTER.match(trains)) is None:
        return PreviousTraining(lora=False, optimizer_states=states)
    return PreviousTraining(lora=True, rank=int(adapter[1]), alpha=int(adapter[2]), optimizer_states=states)


def checkpoint_owner(state_file: Path) -> dict[str, Any]:
    """Return the owner that a checkpoint's `state.json` names; {} where that file cannot be read."""
    try:
        owner = read_object(state_file)["owner"]
    except (OSError, FileError, KeyError):
        return {}
    return owner if isinstance(owner, dict) else {}


@dataclass(frozen=True, slots=True)
class TrainingOption:
    """One way to train. `settings` are the node's with it; `missing` is a package that must be installed first."""

    name: str
    settings: NodeSettings
    made: MemoryPlan
    fits: bool
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """The choice of what to train. `training` describes it and its reason in one line, empty if nothing is trained.

    `options` are all that were compared; empty if there was no choice.
    """

    settings: NodeSettings
    training: str
    options: tuple[TrainingOption, ...] = ()


def choose_training(
    settings: NodeSettings, manifest: RunManifest, home: Home, source: ModelSource, *, others_count: bool = True
) -> TrainingChoice:
    """Return what this node trains here; `others_count` as in `inspect_machine`.

    Raises MachineError if nothing fits, ConfigError for missing GPUs.
    """
    if not settings.learns:
        return TrainingChoice(settings, "")
    begun = _continued(read_previous_training(home, settings.model), settings)
    settings = _keep_rank(settings, begun)
    if not settings.generates or settings.lora is not None:
        return _without_plan(settings, begun, f"the default of the role {settings.role}")
    try:
        shape = read_shape(source)
    except ModelError:
        return _without_plan(settings, begun, "no memory plan for this model")
    planning, machine = inspect_machine(settings, others_count=others_count)
    choice = choose(planning, manifest, shape, machine, begun)
    if begun is None:
        refuse_what_does_not_fit(choice, manifest, shape, machine)
    return TrainingChoice(
        choice.settings.model_copy(update={"engine": settings.engine}), choice.training, choice.options
    )


def choose(
    settings: NodeSettings,
    manifest: RunManifest,
    shape: ModelShape,
    machine: Machine,
    begun: PreviousTraining | None = None,
) -> TrainingChoice:
    """Return the best option that fits, or the last if none does. Raises ConfigError for missing GPUs.

    `engine` "auto" counts as vLLM. If `settings.lora` is set there is no other option.
    """
    begun = _continued(begun, settings)
    if not machine.cards or settings.device == "cpu":
        return _without_plan(settings, begun, "the default on a CPU")
    options = tuple(compare(settings, manifest, shape, machine, begun))
    chosen = best_of([option for option in options if option.fits and not option.missing]) or options[-1]
    if settings.lora is not None:
        reason = _requested_mode(settings)
    elif begun is not None:
        reason = AS_BEGUN
    elif settings.is_quantized:
        reason = AS_QUANTIZED
    else:
        reason = _beside_full(options, chosen, shape)
    activations = f"; {chosen.made.activations}" if chosen.fits else ""
    return TrainingChoice(chosen.settings, f"{chosen.name}{reason}{activations}", options)


def best_of(options: Sequence[TrainingOption]) -> TrainingOption | None:
    """Return the option to take of those that fit, in their order; None of none."""
    best: TrainingOption | None = None
    for option in options:
        gain = ADAPTER_GAIN if option.settings.lora else STATES_GAIN
        if best is not None and best.settings.lora:
            gain = float(option.settings.lora_adapter.rank == best.settings.lora_adapter.rank)  # 0: learns less
        if best is None or option.made.step_s < gain * best.made.step_s:
            best = option
    return best


def compare(
    settings: NodeSettings,
    manifest: RunManifest,
    shape: ModelShape,
    machine: Machine,
    begun: PreviousTraining | None = None,
) -> Iterator[TrainingOption]:
    """Return all options in their order, each with its plan."""
    for name, changed in _candidates(settings, begun, manifest.sampling.group_size):
        made = plan_on(machine, shape, changed, manifest)
        states = changed.learner.optimizer_states
        has_space = states != "offload" or changed.lora or made.host_bytes <= USABLE_SHARE * machine.host_bytes
        needs_package = states == "8bit" and not changed.lora and find_spec("bitsandbytes") is None
        missing = how_to_install("8bit") if needs_package else ""
        yield TrainingOption(name, changed, made, made.fits and bool(has_space), missing)


def refuse_what_does_not_fit(
    choice: TrainingChoice, manifest: RunManifest, shape: ModelShape, machine: Machine
) -> None:
    """Raise MachineError if no option fits, in one line that names a 4-bit base or a smaller model that would.

    With `memory.check` = "warn" it only warns.
    """
    if not choice.options or any(option.fits for option in choice.options):
        return
    if choice.settings.memory.check != "refuse":
        return
    least = min(choice.options, key=lambda option: option.made.peak_bytes)
    instead = smaller_model(choice, manifest, shape, machine)
    model = choice.settings.model
    raise MachineError(
        f"{model} {least.made.refusal}: {least.name} needs {in_gib(least.made.peak_bytes)} and "
        f"{in_gib(least.made.usable_bytes)} are usable{least.made.bound}; {instead} (see "
        f'`ftis-node doctor --model {model}`; memory.check = "warn" starts the node anyway)'
    )


def smaller_model(choice: TrainingChoice, manifest: RunManifest, shape: ModelShape, machine: Machine) -> str:
    """Return as advice the largest Qwen2.5 model that would fit, after a 4-bit base of this model if that would."""
    settings = choice.options[0].settings.model_copy(update={"lora": None})
    first = ""
    can_quantize = not settings.problem_with_quantize and settings.learner.num_ranks == 1 and shape.experts is None
    if not settings.is_quantized and can_quantize:
        quantized = compare(settings.model_copy(update={"quantize": "4bit"}), manifest, shape, machine)
        if (fitting := best_of([option for option in quantized if option.fits])) is not None:
            first = f"with --quantize 4bit {fitting.name} fits; "
    for name, smaller in reversed(published_qwen25().items()):
        if smaller.num_parameters < shape.num_parameters and any(
            option.fits for option in compare(settings, manifest, smaller, machine)
        ):
            return f"{first}the largest Qwen2.5 model that fits is Qwen/{name}"
    return f"{first}no Qwen2.5 model fits: take a larger card"


def _candidates(
    settings: NodeSettings, begun: PreviousTraining | None, group_size: int
) -> Iterator[tuple[str, NodeSettings]]:
    if settings.lora is not None:
        yield training_label(settings), settings
        return
    if (begun is None or not begun.lora) and not settings.is_quantized:
        yield from _with_all_weights(settings, "" if begun is None else begun.optimizer_states)
    if begun is None or begun.lora:
        adapter = settings.lora_adapter
        if begun is not None:
            adapter = adapter.model_copy(update={"rank": begun.rank, "alpha": begun.alpha})
        yield from _with_adapters(
            settings.model_copy(update={"lora": True, "lora_adapter": adapter}),
            group_size,
            keeps_rank=begun is not None,
        )


def _with_all_weights(settings: NodeSettings, kept_states: str) -> Iterator[tuple[str, NodeSettings]]:
    """Return the options that train all weights. `kept_states` are a home's; 8-bit ones cannot be converted."""
    settings = settings.model_copy(update={"lora": False})
    if settings.learner.optimizer_states != "float32" or settings.learner.num_ranks > 1:
        yield ALL_WEIGHTS, settings
        return
    if kept_states != "8bit":
        yield ALL_WEIGHTS, settings
    if kept_states in ("", "8bit"):
        yield f"{ALL_WEIGHTS}, 8-bit optimizer states", _updated(settings, "learner", optimizer_states="8bit")
    if kept_states != "8bit":
        offload = _updated(settings, "learner", optimizer_states="offload")
        yield f"{ALL_WEIGHTS}, optimizer states in host memory", offload


def _with_adapters(settings: NodeSettings, group_size: int, *, keeps_rank: bool) -> Iterator[tuple[str, NodeSettings]]:
    """Return the adapter of the set rank, then smaller ones. An adapter's output keeps the scale alpha / rank."""
    yield training_label(settings), settings
    adapter = settings.lora_adapter
    for divisor, max_batch, micro_batch_tokens in SMALLER_ADAPTERS:
        rank = adapter.rank if keeps_rank else max(min(MIN_RANK, adapter.rank), adapter.rank // divisor)
        alpha = max(1, round(adapter.alpha * rank / adapter.rank))
        rows = min(settings.generation.max_batch or DEFAULT_MAX_BATCH, max(max_batch, group_size))
        tokens = min(settings.learner.micro_batch_tokens or GPU_MICRO_BATCH_TOKENS, micro_batch_tokens)
        smaller = _updated(settings, "lora_adapter", rank=rank, alpha=alpha)
        smaller = _updated(smaller, "generation", max_batch=rows)
        smaller = _updated(smaller, "learner", micro_batch_tokens=tokens)
        yield f"{training_label(smaller)}, batches of {rows} completions and {tokens} tokens", smaller


def _continued(begun: PreviousTraining | None, settings: NodeSettings) -> PreviousTraining | None:
    """Return what a home began, unless a 4-bit base, which implies an adapter, ends it before its first checkpoint."""
    return None if begun is not None and not begun.lora and settings.is_quantized else begun


def _keep_rank(settings: NodeSettings, begun: PreviousTraining | None) -> NodeSettings:
    """Return the settings with the rank of the home's adapter, which may be smaller than today's setting."""
    is_set = settings.lora_adapter.model_fields_set & {"rank", "alpha"}
    if not settings.lora or begun is None or not begun.lora or is_set:
        return settings
    return _updated(settings, "lora_adapter", rank=begun.rank, alpha=begun.alpha)


def _without_plan(settings: NodeSettings, begun: PreviousTraining | None, cause: str) -> TrainingChoice:
    """Return the settings for what the home began with, else for all weights because of `cause`."""
    if settings.lora is not None:
        return TrainingChoice(settings, training_label(settings) + _requested_mode(settings))
    if begun is None:
        reason = AS_QUANTIZED if settings.is_quantized else f" ({cause})"
        settings = settings.model_copy(update={"lora": settings.is_quantized})
        return TrainingChoice(settings, training_label(settings) + reason)
    settings = settings.model_copy(update={"lora": begun.lora})
    if begun.lora:
        settings = _updated(settings, "lora_adapter", rank=begun.rank, alpha=begun.alpha)
    elif begun.optimizer_states == "8bit":
        settings = _updated(settings, "learner", optimizer_states="8bit")
    return TrainingChoice(settings, training_label(settings) + AS_BEGUN)


def _beside_full(options: Sequence[TrainingOption], chosen: TrainingOption, shape: ModelShape) -> str:
    """Return text such as `: full training of 3.09 B needs 59.00 GiB, 20.90 GiB are usable`."""
    full_s = min((each.made.step_s for each in options if each.fits and not each.settings.lora), default=0.0)
    if chosen.settings.lora and full_s:
        return f": a step takes about {chosen.made.step_s:.0f} s, one of all weights {full_s:.0f} s"
    full = options[0].made
    needed, usable = in_gib(full.needed_bytes), in_gib(full.usable_bytes)
    parameters = f"{shape.num_parameters / 1e9:.2f} B"
    return f": full training of {parameters} needs {needed}, {usable} are usable{full.bound}"


def training_label(settings: NodeSettings) -> str:
    base = "" if not settings.is_quantized else " on a 4-bit base"
    return f"a LoRA adapter of rank {settings.lora_adapter.rank}{base}" if settings.lora else ALL_WEIGHTS


def _requested_mode(settings: NodeSettings) -> str:
    return f", as asked ({'--lora' if settings.lora else '--full'})"


def _updated(settings: NodeSettings, section: str, **values: Any) -> NodeSettings:
    """Return the settings with these keys of one section changed."""
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})
