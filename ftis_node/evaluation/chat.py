"""The models of a conversation: a base model and the trained one, or named models.

A question is rendered as a node renders the problems of its task, with the settings of the home. Each model keeps its
own history, with its own answers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import FtisError, UsageError
from ftis_node.evaluation.members import before_and_after
from ftis_node.generation.chat_model import ChatEnvironments, ChatModel, ChatSettings, chat_environments
from ftis_node.models import ModelSource, PromptSettings, resolve_model
from ftis_node.tasks.registry import system_message
from ftis_node.telemetry.log import OnProgress, unwatched

log = logging.getLogger(__name__)


def open_models(
    home: Home,
    *,
    model: str | None,
    compare: str | None,
    alone: bool,
    system: str | None,
    prompts: PromptSettings,
    on_progress: OnProgress = unwatched,
    **settings: Any,
) -> list[ChatModel]:
    """Load `model` or the newest checkpoint of `home`, and before it the base unless `alone`.

    The base is `compare`; of a home it is the model from which the node started. `system` is the system message; None:
    that of the task of the home, or of an exported folder. `prompts` say how the prompts of a named model are rendered.
    `settings` are others of `ChatSettings`. Raises ConfigError if the home has no checkpoint, and ModelError,
    MachineError and NetworkError.
    """
    if alone and compare:
        raise UsageError("--alone and --compare exclude each other: leave one out")
    found = partial(resolve_model, trains=False, on_progress=on_progress)
    about = Home(Path(model).expanduser()) if model else home  # an export has its run.toml
    if system is None:
        system = system_message_of(about)
    chat = ChatSettings(system=system, environments=environments_of(about), **settings)

    def opened(role: str, source: ModelSource, style: PromptSettings = prompts) -> ChatModel:
        on_progress(None, f"loading {source.name}")
        return ChatModel(role, source, prompts=style, settings=chat)

    if model:
        return [opened(role, found(which)) for role, which in (("base", compare), ("model", model)) if which]
    with TemporaryDirectory(prefix="ftis-chat-") as scratch:
        start, trained = before_and_after(home, Path(scratch), on_progress=on_progress)
        models = [] if alone else [opened("base", found(compare or start.model))]
        source = replace(found(trained.model), name=trained.name)
        return [*models, opened("trained", source, PromptSettings())]  # the export has the home's template


def system_message_of(home: Home) -> str:
    """Return the system message of the task of a home or an export; empty if it has none or cannot be loaded."""
    return system_message(load_manifest(str(home.run_toml)).task) if home.run_toml.exists() else ""


def environments_of(home: Home) -> ChatEnvironments | None:
    """Return the environments of the run of a home or an export; None if its task has one turn or cannot be loaded."""
    run = load_manifest(str(home.run_toml)) if home.run_toml.exists() else None
    if run is None or run.episode is None:
        return None
    try:
        return chat_environments(run.task, run.episode)
    except FtisError as error:
        log.warning("turns are not played: %s", error)
        return None
