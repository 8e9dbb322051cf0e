"""Export of a home's newest checkpoint as a model in the format of the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from ftis_node.config.home import Home
from ftis_node.config.home_files import start_command
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.section import first_problem
from ftis_node.errors import ConfigError, DamagedError
from ftis_node.files import read_object
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, read_adapter_config
from ftis_node.node.hub.hub_cards import read_run_record, write_model_card
from ftis_node.node.hub.next_steps import ANY_REPOSITORY
from ftis_node.node.startup.factories import learner_boot
from ftis_node.node.startup.prompts import prompts_of
from ftis_node.tasks.registry import system_message
from ftis_node.telemetry.log import OnProgress, unwatched


def export_model_of(
    home: Home,
    out: Path,
    *,
    merge: bool,
    base: str | None = None,
    license: str | None = None,
    repository: str | None = None,
    on_progress: OnProgress = unwatched,
) -> int:
    """Write the model, its card and the manifest to `out`, and return its training step.

    `base` is the base model's id on the hub if the node was given a folder, `license` the hub's id of a license. A
    folder for a `repository` of the hub names no path of this machine. The chat template is the home's, with its
    arguments as defaults. Raise ConfigError if no node has run with the home, its settings are not of this release, or
    `out` is in use.
    """
    from ftis_node.learner.checkpoint.export import export_newest

    if not home.settings.exists() or not home.run_toml.exists():
        raise ConfigError(f"no node has run with the home {home.root}: give the right one with --home")
    try:
        settings = NodeSettings.model_validate(read_object(home.settings))
    except ValidationError as error:
        problem = first_problem(error, schema=NodeSettings)
        raise DamagedError(f"{home.settings}: {problem}; `{start_command(home)}` writes it again") from error
    manifest = load_manifest(str(home.run_toml))
    source, nothing_planned = resolve_model(settings.model, on_progress=on_progress), WorkerPlacement()
    settings = settings.model_copy(update={"quantize": "none"})  # an adapter is merged into the base as it is published
    boot = learner_boot(settings, manifest, source, home, nothing_planned, weights=home.weights)
    tokenizer = load_tokenizer(source, prompts=prompts_of(settings))
    step = export_newest(boot, out, merge=merge, tokenizer=tokenizer, on_progress=on_progress)
    folder = out.expanduser()
    adapter = read_adapter_config(folder)
    if adapter and (base or repository):  # the name of a local folder is a path of this machine
        adapter["base_model_name_or_path"] = base or source.base.name
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter, indent=2, sort_keys=True), encoding="utf-8")
    record = read_run_record(home, base=base or source.name)
    name = repository or ANY_REPOSITORY
    system = system_message(manifest.task)
    write_model_card(
        folder, record, step=step, name=name, adapter=adapter, tokenizer=tokenizer, system=system, license=license
    )
    return step
