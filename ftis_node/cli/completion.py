"""Shell completion of values that are no fixed choice; typer completes those.

If the home cannot be read or the node does not reply, there are no suggestions. Shells evaluate suggestions, so from
data of peers only ids of letters and digits are suggested.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from pathlib import Path

import typer

from ftis_node.config.home import Home
from ftis_node.errors import FtisError

ENSEMBLE_MODES = ("posterior", "mean", "answer", "vote", "confidence")
NUM_GROUPS = 200
NUM_ID_CHARACTERS = 12  # length of ids in lists
NODE_ANSWERS_S = 0.5
PLAIN = re.compile(r"[A-Za-z0-9]+")


def complete_in_bash(complete: Callable[[], object]) -> None:
    """Print what `complete` prints, for bash, which breaks words at colons as in `arithmetic:add`.

    Bash replaces only the text after the last colon. So the words are joined again, and the suggestions lose that part.
    """
    words, at = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    joined = [*words[: at + 1], *([""] if at >= len(words) else [])]
    while ":" in joined[2:]:
        place = joined.index(":", 2)
        joined[place - 1 : place + 2] = ["".join(joined[place - 1 : place + 2])]
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    before = joined[-1][: joined[-1].rfind(":") + 1]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            complete()
    finally:
        sys.stdout.writelines(f"{one.removeprefix(before)}\n" for one in printed.getvalue().splitlines())


def some_of(*choices: str, separator: str = ",") -> Callable[[str], list[str]]:
    """Return a completer for the last of several values."""

    def complete(incomplete: str) -> list[str]:
        before, mark, last = incomplete.rpartition(separator)
        return [f"{before}{mark}{choice}" for choice in choices if choice.startswith(last)]

    return complete


def methods(incomplete: str) -> list[str]:
    """Complete the last of several comma-separated methods."""
    from ftis_node.config.method_table import METHODS

    return some_of("alone", *METHODS)(incomplete)


def task_specs(incomplete: str) -> list[str]:
    """Complete the last task of a SPEC."""
    from ftis_node.tasks.registry import BUILT_IN

    names = dict.fromkeys(re.split("NAME|PATH", name)[0].removesuffix(":") for name in BUILT_IN)
    return some_of(*names, separator="+")(incomplete)


def presets(incomplete: str) -> list[str]:
    from ftis_node.config.manifest import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def group_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Suggest the newest groups in the home's buffer."""
    import sqlite3

    from ftis_node.replay.reader import ReplayReader

    try:
        with closing(ReplayReader(_home(context).replay)) as reader:
            found = [group.id for group in reader.list_groups(limit=NUM_GROUPS)]
    except (FtisError, OSError, sqlite3.Error):
        return []
    return _offered([group_id[: max(NUM_ID_CHARACTERS, len(incomplete))] for group_id in found], incomplete)


def peer_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Suggest the peers in the node's current or last status."""
    from ftis_node.node.http_api.node_client import read_document

    try:
        rows = read_document(_home(context), "/peers", timeout_s=NODE_ANSWERS_S)
        return _offered([str(row["peer_id"]) for row in rows], incomplete)
    except (FtisError, OSError, ValueError, KeyError, TypeError):
        return []


def _offered(ids: list[str], incomplete: str) -> list[str]:
    return [name for name in ids if name.startswith(incomplete) and PLAIN.fullmatch(name)]


def _home(context: typer.Context) -> Home:
    """Return the home on the command line so far; for `peers --home H ban` the parent command has it."""
    from ftis_node.cli.options import home_at

    given = context.params.get("home") or (context.parent and context.parent.params.get("home"))
    return home_at(Path(given) if given else None)
