"""The settings by which a node renders prompts, for the node itself and for commands that evaluate or export models."""

from __future__ import annotations

from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings, remembered_settings
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.models import PromptSettings


def prompts_of(settings: NodeSettings) -> PromptSettings:
    """Return how a node with these settings renders prompts."""
    return PromptSettings(settings.prompts.template_arguments)


def prompts_for_command(home: Home) -> PromptSettings:
    """Return how a command without a node renders prompts: by the environment, `node.toml` and last start of `home`.

    The home need not exist. Raises ConfigError for a file that cannot be read.
    """
    remembered = remembered_settings(home)  # roles.follow may be there, and role in node.toml
    remembered |= {name: value for name, value in last_settings(home).items() if name == "prompts"}
    return prompts_of(load_node_settings(home.node_toml, remembered=remembered, model="any"))
