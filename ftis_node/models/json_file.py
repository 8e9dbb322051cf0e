"""The small JSON files of a model's folder."""

from __future__ import annotations

from pathlib import Path

from ftis_node.errors import FileError, ModelError
from ftis_node.files import read_object

CONFIG_FILE = "config.json"


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in `path`. Raises ModelError if it is missing or no object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ModelError(f"folder {path.parent} has no {path.name}: it is not a transformers model") from None
    except (OSError, FileError) as error:
        raise ModelError(str(error)) from error
