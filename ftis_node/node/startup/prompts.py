"""The settings by which a node renders prompts, for the node itself and for commands that evaluate or export models."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.config.home_files import last_settings
from ftis_node.config.manifest import load_manifest, read_own_manifest
from ftis_node.config.node import load_node_settings
from ftis_node.errors import FtisError
from ftis_node.models import PromptSettings
from ftis_node.models.chat_template import RUN_DATE
from ftis_node.node.storage.hub_cards import MANIFEST_FILE

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.models import ModelSource

log = logging.getLogger(__name__)


def prompts_of(settings: NodeSettings, manifest: RunManifest) -> PromptSettings:
    """Return how a node with these settings renders the prompts of the run."""
    section = settings.prompts
    return PromptSettings(manifest.prompt_date or RUN_DATE, section.template, section.template_arguments)


def prompts_for_command(home: Home, *, template: str | None = None) -> PromptSettings:
    """Return how a command without a node renders prompts: by the environment, `node.toml` and last start of `home`.

    `template` is the name of a chat template that the command was given. Any other name counts only for a model that
    has several templates. The home need not exist. Raises ConfigError for a file that cannot be read.
    """
    remembered = {name: value for name, value in last_settings(home).items() if name == "prompts"}
    section = load_node_settings(home.node_toml, remembered=remembered, model="any").prompts
    date = read_own_manifest(home.run_toml).prompt_date if home.run_toml.exists() else None
    return PromptSettings(
        date or RUN_DATE, template or section.template, section.template_arguments, needs_names=template is not None
    )


def prompts_of_model(source: ModelSource, prompts: PromptSettings) -> PromptSettings:
    """Return `prompts` with the date of the run that trained the model, if its folder names one, as an export does."""
    path = source.path / MANIFEST_FILE
    if not path.is_file():
        return prompts
    try:
        return replace(prompts, run_date=load_manifest(str(path)).prompt_date or RUN_DATE)
    except FtisError as error:
        log.warning("the date of the prompts is not that of %s, which cannot be read: %s", path, error)
        return prompts
