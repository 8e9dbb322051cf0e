"""Limits of an episode: the table `[episode]` of the manifest, which a run has if its task has several turns."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ftis_node.config.section import Section


class EpisodeSection(Section):
    """Limits of an episode.

    `sampling.max_completion_tokens` bounds each turn, and `max_total_tokens` the prompt, all turns and observations.
    """

    max_turns: int = Field(default=8, ge=1, le=256, description="Turns that a model takes at most in one episode.")
    max_observation_tokens: int = Field(
        default=256, ge=1, le=65536, description="Tokens of an observation that models read; the rest is left out."
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        default=(), max_length=8, description="Texts that end a turn, such as `</tool>`; they stay part of it."
    )
