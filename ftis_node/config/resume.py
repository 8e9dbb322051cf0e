"""What a home remembers of its last start, and the command that resumes it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FileError
from ftis_node.files import read_object

if TYPE_CHECKING:
    from ftis_node.config.home import Home

REMEMBERED = {"model": str, "engine": str, "peers": list, "data_paths": dict}
BUDGET_OPTIONS = {"learn_steps": "--steps", "learn_tokens": "--learn-tokens", "generate_tokens": "--generate-tokens"}


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
    last = last_settings(home)
    words = ["ftis-node", "join", "--home", str(home.root)]
    if not last.get("model"):
        words += ["--model", "MODEL"]
    if last.get("role") not in (None, "full"):
        words += ["--role", str(last["role"])]
    if follow := (last.get("roles") or {}).get("follow"):
        words += ["--follow", str(follow)]
    for name, limit in (raised or {}).items():
        words += [BUDGET_OPTIONS[name], str(limit)]
    return shlex.join(words)
