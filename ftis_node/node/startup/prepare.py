"""Prepares and checks a node's inputs before it starts workers or sends anything; a user's mistakes fail here.

settings -> model found -> full weights or LoRA chosen -> disk space checked -> memory planned
                -> tokenizer -> task
                -> run.toml, settings.json and a missing node.toml written to the home

The state may change after a check, so the code that opens the port or writes the file raises errors too. Users rarely
see those.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings, make_node_toml
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.files import free_bytes, replace_file
from ftis_node.memory.choice import checkpoint_owner, choose_training
from ftis_node.models import PromptSettings, PromptTokenizer, load_tokenizer, model_fingerprint, resolve_model
from ftis_node.models.accelerators import unusable_system
from ftis_node.models.adapter_folder import continued
from ftis_node.models.fingerprint import other_model
from ftis_node.models.quantized import check_dense
from ftis_node.models.quantized import check_installed as check_bitsandbytes
from ftis_node.models.source import ModelSource
from ftis_node.node.loops.pause import first_decision
from ftis_node.node.startup.factories import NodeFactory, NodeInputs
from ftis_node.node.startup.run_plan import RunPlan, from_anywhere
from ftis_node.node.storage.home_size import checkpoint_bytes, limit_of
from ftis_node.node.supervision.waits import in_background
from ftis_node.records.identity import Identity, peer_id_from_text
from ftis_node.tasks import load_task, parse_spec
from ftis_node.tasks.base import Task, TaskItem, leaves
from ftis_node.tasks.episodes.episode import is_episode
from ftis_node.telemetry.log import OnProgress
from ftis_node.telemetry.secrets import keep_secret
from ftis_node.telemetry.tracking import check_installed
from ftis_node.workers.durable import CHECKPOINT_PREFIX, newest_complete

RESERVE_BYTES = 32 << 20  # for the groups, events and logs of the first minutes


async def prepare(
    settings: NodeSettings, plan: RunPlan, home: Home, factory: NodeFactory, on_progress: OnProgress
) -> NodeInputs:
    """Return the inputs of the components. `factory` places the workers and starts none.

    Raise ModelError, TaskError, ConfigError, UsageError, NetworkError, MachineError.
    """
    if problem := unusable_system():
        raise MachineError(str(problem))
    paths = settings.data_paths | from_anywhere(parse_spec(plan.task_spec).paths)
    settings = settings.model_copy(update={"task": plan.domain_spec or "", "data_paths": paths})  # for a later start
    _check_codec(settings, plan.manifest)
    _check_followed(settings)
    _check_quantized(settings)
    check_installed(settings.tracking.to)
    identity = Identity.load_or_create(home.identity)
    keep_secret(identity.seed)
    on_progress(None, f"looking for the model {Path(settings.model).name}")
    source = await in_background(partial(resolve_model, settings.model, on_progress=on_progress))
    if settings.is_quantized:
        await in_background(check_dense, source)
    if settings.learns:
        await in_background(check_owner, home, source, lora=settings.lora if not settings.is_quantized else True)
        settings = continued(settings, source.adapter)
    least = settings if settings.lora is not None else settings.model_copy(update={"lora": True})
    await in_background(check_disk_space, home, source, least)  # first: `choose_training` has to load torch
    on_progress(None, "planning the memory")
    starts_paused = (await in_background(first_decision, settings, home)).is_pause
    choose = partial(choose_training, others_count=not starts_paused)  # by the start of the workers they have ended
    choice = await in_background(choose, settings, plan.manifest, home, source)
    settings, training = choice.settings, choice.training
    if source.adapter is not None and settings.lora:
        training = f"the LoRA adapter of rank {settings.lora_adapter.rank} in {source.adapter}"
    await in_background(check_disk_space, home, source, settings)
    limit = await in_background(limit_of, settings, source)
    arrangement = await factory.arrange(settings, plan.manifest, source, others_count=not starts_paused)
    on_progress(None, "loading the tokenizer")
    prompts = PromptSettings(settings.prompts.template_arguments)
    tokenizer = await in_background(partial(load_tokenizer, source, prompts=prompts))
    on_progress(None, "loading the task's problems")
    task, domain, eval_tasks = await in_background(load_tasks, plan)
    await in_background(check_texts, tokenizer, domain[0], plan.manifest)
    replace_file(home.run_toml, plan.manifest.to_toml().encode())
    replace_file(home.settings, settings.model_dump_json(indent=1).encode())
    make_node_toml(home)
    return NodeInputs(
        settings=settings,
        manifest=plan.manifest,
        home=home,
        identity=identity,
        source=source,
        arrangement=arrangement,
        training=training,
        tokenizer=tokenizer,
        task=task,
        domain=domain,
        eval_tasks=eval_tasks,
        limit=limit,
    )


def check_texts(tokenizer: PromptTokenizer, item: TaskItem, manifest: RunManifest) -> None:
    """Raise ModelError if the model cannot read a prompt of the run, or the observations of its episodes.

    Also for a stop string with a special token, because a turn with such a token has no reward.
    """
    tokenizer.encode_prompt(item.prompt)  # its ids may have no embedding
    if manifest.episode is None:
        return
    try:
        tokenizer.encode_observation("", opening="", max_tokens=0)
    except ModelError as error:
        raise ModelError(f"run {manifest.name} has several turns, and this model reads one: {error}") from error
    if special := [string for string in manifest.episode.stop if tokenizer.has_hidden(string)]:
        raise ModelError(f"the stop string {special[0]!r} of run {manifest.name} is a special token here: omit it")


def load_tasks(plan: RunPlan) -> tuple[Task, Task, tuple[Task, ...]]:
    """Return the run's task, this node's domain of it, and the held-out tasks to evaluate on."""
    task = load_task(plan.task_spec, split="train")
    domain = load_task(plan.domain_spec, split="train") if plan.domain_spec else task
    if any(is_episode(leaf) != (plan.manifest.episode is not None) for leaf in leaves(task)):
        raise ConfigError(
            f"the run {plan.manifest.name} needs the table [episode] if all tasks of {task.name} have several turns, "
            "and must not have it otherwise"
        )
    return task, domain, tuple(load_task(spec, split="test") for spec in plan.eval_specs)


def _check_codec(settings: NodeSettings, manifest: RunManifest) -> None:
    codec, allowed = settings.swarm.codec, manifest.wire.codecs
    if codec not in allowed:
        raise ConfigError(
            f"swarm.codec is {codec!r} and run {manifest.name} takes {', '.join(allowed)}: "
            f"set swarm.codec to one of these, or add {codec!r} to the run's wire.codecs"
        )


def _check_followed(settings: NodeSettings) -> None:
    if settings.roles.follow:
        try:
            peer_id_from_text(settings.roles.follow)
        except ValueError:
            raise ConfigError(
                f"{settings.roles.follow!r} is not a peer id (12D3KooW...): `ftis-node status` on the learner shows it"
            ) from None


def _check_quantized(settings: NodeSettings) -> None:
    if not settings.is_quantized:
        return
    check_bitsandbytes()
    if settings.learns and settings.learner.num_ranks > 1:
        raise ConfigError(
            f"--quantize 4bit is for a learner of one process, not of {settings.learner.num_ranks}: remove one of the "
            "two, or set learner.processes = 1"
        )


def check_owner(home: Home, source: ModelSource, *, lora: bool | None) -> None:
    """Raise ConfigError if the home's newest checkpoint is of another model, or disagrees with `lora`.

    If `lora` is None, full weights and an adapter both pass. The learner handles a checkpoint that cannot be read.
    """
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    owner = {} if newest is None else checkpoint_owner(newest / "state.json")
    if not owner:
        return
    if owner.get("model_fingerprint") != model_fingerprint(source):
        raise ConfigError(other_model(home.root, owner.get("model"), source.name))
    trained_lora = owner.get("trains") != "full"
    if lora is not None and trained_lora != lora:
        begun, now = ("--lora", "--full") if trained_lora else ("--full", "--lora")
        raise ConfigError(f"{home.root} was started with {begun}, not {now}: give {begun}, or another --home")


def check_finished(home: Home, settings: NodeSettings) -> None:
    """Raise ConfigError if changed settings do not fit the newest checkpoint: another model, full weights versus LoRA.

    A start of a finished home ends before `prepare` calls `check_owner`. Settings that match the last start are not
    checked, because resolving a model may query the Hugging Face hub. Raise ModelError for a model that is not found.
    """
    last = last_settings(home)
    if settings.model != last.get("model") or settings.lora not in (None, last.get("lora")):
        check_owner(home, resolve_model(settings.model), lora=settings.lora)


def check_disk_space(home: Home, source: ModelSource, settings: NodeSettings) -> None:
    """Raise MachineError if the home's disk has no space for one more checkpoint."""
    needed, free = RESERVE_BYTES, free_bytes(home.root)
    if settings.learns:
        needed += checkpoint_bytes(source, settings)
    if free < needed:
        raise MachineError(
            f"the disk is too full: {free / 1e6:.0f} MB are free at {home.root}, {needed / 1e6:.0f} MB are needed: "
            "free disk space, or give another --home"
        )
