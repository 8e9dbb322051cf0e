"""Plug-ins: objects of other installed packages, found by their entry points.

| entry-point group | names | its object |
|---|---|---|
| `ftis_node.tasks` | a task | called with the split, returns a `Task` (`tasks/plugins.py`) |
| `ftis_node.episodes` | a task of several turns | called with the split, returns an `Episode` (`tasks/episodes/`) |
| `ftis_node.rewards` | a reward | called with a `TaskItem` and a completion's text, returns a number in [0, 1] |
| `ftis_node.methods` | a loss method | a `Method` (`algorithms/methods.py`) |
| `ftis_node.filters` | a filter of completions | called with a `Batch` and `Settings`, returns bool `[N]` |
| `ftis_node.advantages` | advantages | called with a `ScoredBatch` (`algorithms/scored_batch.py`), returns `[N]` |
| `ftis_node.choices` | a choice of a step's groups | `replay/group_choice.py` has its arguments |

A plug-in is third-party code. ftis-node never fetches one. Listing plug-ins imports none of them, so a broken one
affects only its users. Each of its exceptions becomes one line that names its package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Final

from ftis_node.errors import FtisError

TASK_GROUP: Final = "ftis_node.tasks"
EPISODE_GROUP: Final = "ftis_node.episodes"
REWARD_GROUP: Final = "ftis_node.rewards"
METHOD_GROUP: Final = "ftis_node.methods"
FILTER_GROUP: Final = "ftis_node.filters"
ADVANTAGE_GROUP: Final = "ftis_node.advantages"
CHOICE_GROUP: Final = "ftis_node.choices"
_KINDS = ("task", "episode", "reward", "method", "filter", "advantage", "choice")
KINDS: Final = {f"ftis_node.{kind}s": kind for kind in _KINDS}  # by group


@dataclass(frozen=True, slots=True)
class Plugin:
    """Plug-in as its package declares it, not yet imported. `target` is MODULE:OBJECT."""

    kind: str
    name: str
    package: str
    version: str
    target: str

    @property
    def release(self) -> str:
        return f"{self.package} {self.version}"

    def __str__(self) -> str:
        return f"the plug-in {self.kind} {self.name!r} of {self.release}"


def find_plugins(group: str) -> list[Plugin]:
    """Return all plug-ins of a group, sorted by name and package."""
    return sorted((describe(entry) for entry in entry_points(group=group)), key=lambda one: (one.name, one.package))


def find_entry(group: str, name: str, *, error: type[FtisError]) -> EntryPoint | None:
    """Return the only entry point with this name; None if there is none. Raises `error` if two packages have it."""
    found = list(entry_points(group=group, name=name))
    if len(found) > 1:
        packages = " and ".join(sorted(describe(entry).package for entry in found))
        raise error(f"{packages} both have a plug-in {name!r}: uninstall one of them")
    return found[0] if found else None


def describe(entry: EntryPoint) -> Plugin:
    """Return the plug-in behind an entry point, without importing it."""
    package, version = (entry.dist.name, entry.dist.version) if entry.dist else ("an unnamed package", "?")
    return Plugin(kind=KINDS[entry.group], name=entry.name, package=package, version=version, target=entry.value)


def load_function(
    group: str, name: str, *, error: type[FtisError]
) -> tuple[Plugin, Callable[..., Any]] | tuple[None, None]:
    """Return the plug-in `name` and its function, or None twice if no package has one. Raises `error` if faulty."""
    entry = find_entry(group, name, error=error)
    if entry is None:
        return None, None
    plugin = describe(entry)
    function = call_plugin(plugin, entry.load, error=error)
    if not callable(function):
        raise error(f"{plugin} is a {type(function).__name__}, which cannot be called")
    return plugin, function


def call_plugin(plugin: Plugin, work: Callable[[], Any], *, error: type[FtisError]) -> Any:
    """Run the plug-in's code and return its result.

    Raises a one-line `error` for any exception, even SystemExit; an FtisError passes unchanged.
    """
    try:
        return work()
    except FtisError:
        raise
    except (Exception, SystemExit) as cause:
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise error(f"{plugin} failed: {reason}; report it to its authors, or uninstall it") from cause


def installed_release(package: str) -> str | None:
    """Return the release of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
