"""The models of a conversation: a base model and the trained one, or named models.

A question is rendered as a node renders the problems of its task, with the settings of the home. Each model keeps its
own history, with its own answers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import UsageError
from ftis_node.generation.chat_model import ChatModel, ChatSettings
from ftis_node.models import ModelSource, PromptSettings, resolve_model
from ftis_node.node.hub.model_export import export_model_of
from ftis_node.tasks.registry import system_message
from ftis_node.telemetry.log import OnProgress, unwatched


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
    """Load `model`, or the newest checkpoint of `home`, and before it the base model unless `alone`.

    The base is `compare`; of a home it is the model from which the node started. `system` is the system message; None:
    that of the task of the home, or of an exported folder. `prompts` say how the prompts of a named model are rendered.
    `settings` are others of `ChatSettings`. Raises ConfigError if the home has no checkpoint, and ModelError,
    MachineError and NetworkError.
    """
    if alone and compare:
        raise UsageError("--alone and --compare exclude each other: leave one out")
    found = partial(resolve_model, trains=False, on_progress=on_progress)
    if system is None:
        system = system_message_of(Home(Path(model).expanduser()) if model else home)  # an export has its run.toml
    chat = ChatSettings(system=system, **settings)

    def opened(role: str, source: ModelSource, style: PromptSettings = prompts) -> ChatModel:
        on_progress(None, f"loading {source.name}")
        return ChatModel(role, source, prompts=style, settings=chat)

    if model:
        return [opened(role, found(which)) for role, which in (("base", compare), ("model", model)) if which]
    with TemporaryDirectory(prefix="ftis-chat-") as scratch:
        folder = Path(scratch) / "model"
        step = export_model_of(home, folder, merge=True, on_progress=on_progress)
        start = found(str(last_settings(home)["model"]))
        models = [] if alone else [opened("base", found(compare) if compare else start)]
        trained = replace(found(str(folder)), name=f"{start.name} after step {step}")
        return [*models, opened("trained", trained, PromptSettings())]  # the export has the home's template


def system_message_of(home: Home) -> str:
    """Return the system message of the task of a home or an export; empty if it has none or cannot be loaded."""
    return system_message(load_manifest(str(home.run_toml)).task) if home.run_toml.exists() else ""
