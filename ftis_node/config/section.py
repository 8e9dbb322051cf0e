"""Base class of the tables of both configuration files."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 1e9  # bound of settings without a natural one: above any use, well within float32

Positive = Annotated[float, Field(gt=0, le=MOST)]


class Section(BaseModel):
    """A table of the manifest or of `node.toml`: frozen, with no unknown keys and no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
