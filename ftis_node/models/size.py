"""Number of a model's parameters, from the headers of its weight files alone."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ftis_node.models.safetensors_file import read_header

if TYPE_CHECKING:
    from ftis_node.models.source import ModelSource


def parameter_count(source: ModelSource) -> int:
    """Return the stored parameters; tied weights are stored once. Raises ModelError for a damaged file."""
    headers = (read_header(path) for path in source.weights_files)
    return sum(prod(entry["shape"]) for header in headers for entry in header.tensors.values())
