"""Which version of ftis-node a home was made for: `home.json`, one number.

    {"schema": 5}

The number rises when a version can no longer read what an older one wrote: a column of the buffer, a field of the
checkpoints, a setting of the run that all old manifests are without (it changes their run id). The steps from each
number to the next are in `node/startup/migrations.py`. Homes from before the file are told by what is in them.
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
TOLD = "the next start tells from the home what belongs there"


def marked_schema(home: Home) -> int | None:
    """The number in the home's marker; None where it has none. Raises ConfigError where it cannot be read."""
    try:
        schema = read_object(home.marker).get("schema")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileError as error:
        raise ConfigError(f"{home.marker} is damaged: remove it; {TOLD} ({error})") from None
    if not isinstance(schema, int) or schema < 1:
        raise ConfigError(f"{home.marker} is damaged: remove it; {TOLD}")
    return schema


def is_older(home: Home) -> bool:
    """Return whether an older version wrote the home. A folder without groups and checkpoints is a new home."""
    schema = marked_schema(home)
    if schema is None:
        return home.replay.exists() or any(home.checkpoints.glob("step-*"))
    return schema < HOME_SCHEMA


def refuse_newer(home: Home) -> None:
    """Raises ConfigError where a newer version of ftis-node has written the home. Changes nothing."""
    schema = marked_schema(home)
    if schema is not None and schema > HOME_SCHEMA:
        raise ConfigError(
            f"{home.root} was written by a newer ftis-node (schema {schema}, this one knows {HOME_SCHEMA}): "
            "update ftis-node, or give another --home"
        )


def mark_schema(home: Home, schema: int) -> None:
    """Writes the marker, whole or not at all. Raises OSError."""
    replace_file(home.marker, (json.dumps({"schema": schema}) + "\n").encode())
