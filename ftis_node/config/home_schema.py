"""Schema version of a home: `home.json`, one number.

    {"schema": 5}

The number rises when a version can no longer read what an older one wrote. Examples are a new column of the buffer and
a new field of the checkpoints. A new setting of the run is another, because it changes the run id of old manifests. The
steps from each number to the next are in `node/startup/migrations.py`. A home without the file is recognized by its
content.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import replace_file
from ftis_node.errors import ConfigError, FileError
from ftis_node.files import read_object

if TYPE_CHECKING:
    from ftis_node.config.home import Home

HOME_SCHEMA = 5
REBUILT = "the next start writes it again from the home's content"


def marked_schema(home: Home) -> int | None:
    """Return the number in the home's marker; None if there is no marker. Raises ConfigError if it cannot be read."""
    try:
        schema = read_object(home.marker).get("schema")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileError as error:
        raise ConfigError(f"{home.marker} is damaged: remove it; {REBUILT} ({error})") from None
    if not isinstance(schema, int) or schema < 1:
        raise ConfigError(f"{home.marker} is damaged: remove it; {REBUILT}")
    return schema


def is_older(home: Home) -> bool:
    """Return whether an older version wrote the home. A folder without groups and checkpoints is a new home."""
    schema = marked_schema(home)
    if schema is None:
        return home.replay.exists() or any(home.checkpoints.glob("step-*"))
    return schema < HOME_SCHEMA


def refuse_newer(home: Home) -> None:
    """Raise ConfigError if a newer version of ftis-node wrote the home. Changes nothing."""
    schema = marked_schema(home)
    if schema is not None and schema > HOME_SCHEMA:
        raise ConfigError(
            f"{home.root} was written by a newer ftis-node (schema {schema}, this one knows {HOME_SCHEMA}): "
            "update ftis-node, or give another --home"
        )


def mark_schema(home: Home, schema: int) -> None:
    """Write the marker, whole or not at all. Raises OSError."""
    replace_file(home.marker, (json.dumps({"schema": schema}) + "\n").encode())
