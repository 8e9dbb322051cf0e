"""Members of an ensemble: named models, and those of one operator's nodes.

A folder of a swarm is an exported model, a node's home, or a folder of such folders. From a home the newest checkpoint
is exported to a scratch folder first, with an adapter merged into its model. A node that trains nothing has none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.home_files import check_schema, last_settings, remembered_paths, remembered_settings
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import load_node_settings
from ftis_node.errors import ConfigError, DamagedError, FileError
from ftis_node.export.model_export import export_model_of
from ftis_node.files import read_object
from ftis_node.models import PromptSettings, resolve_model
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE
from ftis_node.models.model_files import CONFIG_FILE
from ftis_node.tasks import held_out_spec, parse_spec
from ftis_node.telemetry.log import OnProgress, unwatched
from ftis_node.workers.durable import CHECKPOINT_PREFIX, newest_complete

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """One expert: its `name`, its `model` (a folder, or an id on the hub), and its `domain` if known.

    `prompts` say how its prompts are rendered; None: as those of the command.
    """

    name: str
    model: str
    domain: str | None = None
    prompts: PromptSettings | None = None


def as_members(models: Iterable[str | Member]) -> list[Member]:
    """Return members with different names: the folder's name or the hub id, with a number if it is taken.

    Raises ConfigError if there are no models.
    """
    members: list[Member] = []
    for model in models:
        member = model if isinstance(model, Member) else Member(_short_name(model), model)
        taken = {other.name for other in members}
        names = chain([member.name], (f"{member.name}-{number}" for number in count(2)))
        members.append(replace(member, name=next(name for name in names if name not in taken)))
    if not members:
        raise ConfigError("an ensemble needs models: name them with --models A,B or --swarm FOLDER")
    return members


def swarm_members(folders: Sequence[Path], scratch: Path, *, on_progress: OnProgress = unwatched) -> list[Member]:
    """Return the models in and below `folders`, by name of their folder; homes are exported into `scratch`.

    Raises ConfigError for a folder without a model, and the exceptions of an export.
    """
    return [member for folder in folders for member in _folder_members(folder.expanduser(), scratch, on_progress)]


def _folder_members(folder: Path, scratch: Path, on_progress: OnProgress) -> list[Member]:
    """Return the models of one folder, at least one. Raises as `swarm_members`."""
    if not folder.is_dir():
        raise ConfigError(f"no such folder: {folder}; give one that holds exported models or homes of nodes")
    inside = [folder] if _is_model(folder) or _is_home(folder) else sorted(filter(Path.is_dir, folder.iterdir()))
    found = [
        _exported(Home(each), scratch, on_progress) if _is_home(each) else Member(each.resolve().name, str(each))
        for each in inside
        if _is_model(each) or _is_home(each)
    ]
    members = [member for member in found if member is not None]
    if not members:
        raise ConfigError(
            f"{folder} holds no trained model: give a folder of exported models (ftis-node export --out) or of homes "
            "of nodes that learn"
        )
    return members


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / ADAPTER_CONFIG_FILE).is_file()


def _is_home(folder: Path) -> bool:
    home = Home(folder)
    return home.settings.is_file() and home.run_toml.is_file()


def _exported(home: Home, scratch: Path, on_progress: OnProgress) -> Member | None:
    check_schema(home)
    try:
        settings = read_object(home.settings)
        role, name, domain = (str(settings.get(key) or "") for key in ("role", "name", "task"))
    except (OSError, FileError) as error:
        raise DamagedError(f"{home.settings} cannot be read: {error}; the next start of the node repairs it") from None
    if role in ("generator", "exchange"):
        return None
    if newest_complete(home.checkpoints, CHECKPOINT_PREFIX) is None:
        log.warning("%s is skipped: it has no checkpoint yet", home.root)
        return None
    name = name or home.root.resolve().name
    number = sum(1 for _ in scratch.iterdir())
    out = scratch / f"{number}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)}"
    on_progress(None, f"exporting the model of {name}")
    export_model_of(home, out, merge=True, on_progress=on_progress)
    # The export has the home's chat template with its arguments, and the run's date.
    return Member(name, str(out), domain or load_manifest(str(home.run_toml)).task, PromptSettings())


def before_and_after(home: Home, scratch: Path, *, on_progress: OnProgress = unwatched) -> tuple[Member, Member]:
    """Return the model from which the home's node started, and its newest checkpoint, exported into `scratch`.

    Raises ConfigError if the home has no checkpoint, and ModelError and NetworkError.
    """
    folder = scratch / "model"
    step = export_model_of(home, folder, merge=True, on_progress=on_progress)
    start = str(last_settings(home)["model"])
    name = resolve_model(start, trains=False, on_progress=on_progress).name
    # The export has the home's chat template with its arguments.
    return Member(name, start), Member(f"{name} after step {step}", str(folder), prompts=PromptSettings())


def held_out_task(home: Home) -> str:
    """Return the SPEC of the held-out problems of the home's run. Raises ConfigError if it has none, or no run."""
    if not home.run_toml.exists():
        raise ConfigError(
            f"no node has run with the home {home.root}: give the right one with --home, or --model MODEL"
        )
    spec = parse_spec(load_manifest(str(home.run_toml)).task)
    held_out = held_out_spec(spec.with_paths(remembered_paths(home)))
    if held_out is None:
        raise ConfigError(f"the run of {home.root} has no held-out problems: name others with --task SPEC")
    return str(held_out)


def limits_of_run(home: Home) -> dict[str, int]:
    """Return the limits in tokens of the home's run, as `answers_of` takes them: those of the node's evaluations.

    Raises ConfigError if the home has no run.
    """
    sampling = load_manifest(str(home.run_toml)).sampling
    return {"max_tokens": sampling.max_total_tokens, "max_completion_tokens": sampling.max_completion_tokens}


def _short_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def prompts_for_command(home: Home) -> PromptSettings:
    """Return how a command without a node renders prompts: by the environment, `node.toml` and last start of `home`.

    The home need not exist. Raises ConfigError for a file that cannot be read.
    """
    remembered = remembered_settings(home)  # roles.follow may be there, and role in node.toml
    remembered |= {name: value for name, value in last_settings(home).items() if name == "prompts"}
    settings = load_node_settings(home.node_toml, remembered=remembered, model="any")
    return PromptSettings(settings.prompts.template_arguments)
