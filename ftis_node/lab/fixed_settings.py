"""Settings of a node that a measurement sets, without the user's environment."""

from __future__ import annotations

from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from ftis_node.config.node import NodeSettings


class FixedSettings(NodeSettings):
    """Settings without the environment, so that it does not change a result."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)
