"""Shell completion of option values and arguments.

Completion imports nothing heavy, so it repeats some names; a test compares them with those in the code. If the home
cannot be read or the node does not reply, there are no suggestions. Shells evaluate suggestions, so from peers' data
only ids of letters and digits are suggested.

Bash splits `arithmetic:a` at the colon, and Typer's script does not rejoin it. `joined_words` joins the words of the
request before Typer reads them, and removes from each suggestion the part that bash keeps.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftis_node.config.home import Home

PRESETS = ("arithmetic-compare", "arithmetic-ftis", "arithmetic-hdee", "gsm8k-ftis", "rg-swarm", "sums-ftis")
TASKS = (
    *("arithmetic", "arithmetic:add", "arithmetic:sub", "arithmetic:easy", "arithmetic:medium", "arithmetic:hard"),
    *("arithmetic:no-carry", "arithmetic:carry", "arithmetic:borrow"),
    *("sums", "sums:long", "gsm8k", "math500", "dataset:", "rg:"),
)
ENGINES = ("auto", "vllm", "torch")
ENSEMBLE_MODES = ("posterior", "mean", "answer", "vote", "confidence")
ROLES = ("full", "generator", "learner", "exchange")
STATES = ("ready", "taken", "released")
NUM_GROUPS = 200
NUM_ID_CHARACTERS = 12  # length of ids in lists
NODE_ANSWERS_S = 0.5
PLAIN = re.compile(r"[A-Za-z0-9]+")
INSTRUCTION = "_FTIS_NODE_COMPLETE"
BREAKS = re.compile(r"[:=]+")  # the characters of COMP_WORDBREAKS in names of tasks and options


def one_of(*choices: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def some_of(*choices: str, separator: str = ",") -> Callable[[str], list[str]]:
    """Return a completer for the last of several values."""

    def complete(incomplete: str) -> list[str]:
        before, mark, last = incomplete.rpartition(separator)
        return [f"{before}{mark}{choice}" for choice in choices if choice.startswith(last)]

    return complete


def methods(incomplete: str) -> list[str]:
    """Complete the last of several comma-separated methods, including plug-ins."""
    from ftis_node.config.method_table import METHODS
    from ftis_node.plugins import METHOD_GROUP

    return some_of("alone", *METHODS, *_plugins(METHOD_GROUP))(incomplete)


def task_specs(incomplete: str) -> list[str]:
    """Complete the last task of a SPEC, including plug-ins."""
    from ftis_node.plugins import TASK_GROUP

    return some_of(*TASKS, *_plugins(TASK_GROUP), separator="+")(incomplete)


def _plugins(group: str) -> list[str]:
    from importlib.metadata import entry_points

    return sorted(plugin.name for plugin in entry_points(group=group))


def page_names(incomplete: str) -> list[str]:
    from ftis_node.documentation import find_pages

    try:
        return [name for name in find_pages() if name.startswith(incomplete)]
    except (OSError, ValueError):
        return []


def group_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Suggest the newest groups in the home's buffer."""
    import sqlite3

    from ftis_node.replay.reader import ReplayReader

    try:
        with contextlib.closing(ReplayReader(_home(context).replay)) as reader:
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

    here: Any = context
    while here is not None:
        if path := here.params.get("home"):
            return home_at(Path(path))
        here = here.parent
    return home_at(None)


@contextlib.contextmanager
def joined_words() -> Iterator[None]:
    """Handle a completion request of bash as if it split words only at spaces. Does nothing for other commands."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    if os.environ.get(INSTRUCTION) != "complete_bash" or len(words) < 2:
        yield
        return
    joined, kept = join_words(words[: int(os.environ["COMP_CWORD"]) + 1])
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    answer = io.StringIO()
    try:
        with contextlib.redirect_stdout(answer):
            yield
    finally:
        for line in answer.getvalue().splitlines():
            typer.echo(line.removeprefix(kept))


def join_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words as typed, and the start of the last word's value that bash keeps on the line."""
    joined: list[str] = []
    after_break, kept = False, ""
    for index, word in enumerate(words):
        is_break = BREAKS.fullmatch(word) is not None
        if joined and (is_break or (after_break and word and not word.startswith("-"))):
            joined[-1] += word
        else:
            joined.append(word)
        after_break = is_break
        if index == len(words) - 1 and (broken := BREAKS.search(joined[-1])):
            kept = joined[-1] if is_break else joined[-1].removesuffix(word)
            if kept.startswith("-"):  # Typer's answer is the value without `--option=`
                kept = kept[broken.end() :]
    return joined, kept
