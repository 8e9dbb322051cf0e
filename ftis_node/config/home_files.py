"""Files of a home: the marker, `node.toml` of its operator, and the settings of its last start with their command.

The marker `home.json` has the number of the schema. A home with another number is refused, because no version but the
present one has been released. It also has the epoch of the last start (`node/storage/node_store.py`).
"""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, FileError
from ftis_node.files import read_object, replace_file

HOME_SCHEMA = 1
MAX_EPOCH = 1 << 42  # seconds: a larger one is no time
REBUILT = "the next start writes it again from the home's content"
REMEMBERED = {
    **dict.fromkeys(("model", "engine", "quantize", "name", "role"), str),
    **dict.fromkeys(("peers", "listen"), list),
    **dict.fromkeys(("data_paths", "roles"), dict),
}
BUDGET_OPTIONS = {"learn_steps": "--steps", "learn_tokens": "--learn-tokens", "generate_tokens": "--generate-tokens"}


def marked_epoch(home: Home) -> int:
    """Return the epoch of the home's last start; 0 before the first. Raises as `check_schema`."""
    try:
        marker = read_object(home.marker)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except FileError as error:
        raise ConfigError(f"{home.marker} is damaged: remove it; {REBUILT} ({error})") from None
    schema, epoch = marker.get("schema"), marker.get("epoch", 0)
    if not (isinstance(schema, int) and schema >= 1 and isinstance(epoch, int) and 0 <= epoch <= MAX_EPOCH):
        raise ConfigError(f"{home.marker} is damaged: remove it; {REBUILT}")
    if schema != HOME_SCHEMA:
        raise ConfigError(
            f"{home.root} was written by another version of ftis-node (schema {schema}, this one reads {HOME_SCHEMA}): "
            "use that version, or give another --home"
        )
    return epoch


def check_schema(home: Home) -> None:
    """Raise ConfigError if another version of ftis-node wrote the home, or if its marker is damaged."""
    marked_epoch(home)


def mark(home: Home, *, epoch: int) -> None:
    """Write the marker, whole or not at all. Raises OSError."""
    replace_file(home.marker, (json.dumps({"schema": HOME_SCHEMA, "epoch": epoch}) + "\n").encode())


def last_settings(home: Home) -> dict[str, Any]:
    """Return the settings of the last start; {} if the home has none that can be read."""
    try:
        return read_object(home.settings)
    except (OSError, FileError):
        return {}


def remembered_settings(home: Home) -> dict[str, Any]:
    """Return the settings that a later start takes over where neither flag, environment nor node.toml has one."""
    last = last_settings(home)
    return {key: last[key] for key, kind in REMEMBERED.items() if isinstance(last.get(key), kind) and last[key]}


def remembered_paths(home: Home) -> dict[str, str]:
    """Return the data files of the last start, by task name."""
    paths = remembered_settings(home).get("data_paths", {})
    return {name: path for name, path in paths.items() if isinstance(path, str)}


def raised_budgets(budget: dict[str, Any]) -> dict[str, int]:
    """Return twice the limit of each budget of a status document that is used up."""
    return {name: 2 * amount["limit"] for name, amount in budget.items() if amount.get("limit") and not amount["left"]}


def start_command(home: Home, *, raised: dict[str, int] | None = None) -> str:
    """Return the command that resumes this home's node. `raised` are budgets by name, as higher limits."""
    words = ["ftis-node", "join", "--home", str(home.root)]
    if "model" not in remembered_settings(home):
        words += ["--model", "MODEL"]
    for name, limit in (raised or {}).items():
        words += [BUDGET_OPTIONS[name], str(limit)]
    return shlex.join(words)


def make_node_toml(home: Home) -> None:
    """Create the file of the operator's settings, if there is none."""
    if not os.path.lexists(home.node_toml):
        replace_file(home.node_toml, b"# Your settings of this node: ftis-node docs reference/configuration\n")
