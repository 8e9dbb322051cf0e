"""The documented commands that take less than a minute on a CPU run on the small swarm.

`_filled` replaces placeholders by addresses, homes and models of this swarm, and reduces the number of problems.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from ftis_node.cli.app import app, run
from ftis_node.records.identity import Identity
from tests.documented.pages import PAGES, ROOT, Command, blocks, commands
from tests.models.tiny_models import save_tiny
from tests.node.support import ANY_PORT, RunningNode, started
from tests.small_swarm import SmallSwarm

pytestmark = pytest.mark.timeout(600)
STEP_S = 400.0  # for the example's one step on a loaded machine

JOIN, BOOTSTRAP = ("ftis-node", "join"), ("ftis-node", "bootstrap")
PATTERNS = (  # words in capitals are replaced
    "ftis-node join --model models/s --task arithmetic --peers ADDRESS --home homes/s --engine torch --steps 10",
    "ftis-node join --model DIR --run examples/ftis-node-task-sorting/run.toml --steps 1",
    "ftis-node bootstrap --home homes/bootstrap",
    "ftis-node doctor --model DIR --peers ADDRESS",
    "ftis-node status*",
    "ftis-node peers*",
    "ftis-node replay list*",
    "ftis-node replay stats*",
    "ftis-node replay show*",
    "ftis-node tasks*",
    "ftis-node eval --model models/s --task arithmetic*",
    "ftis-node ensemble --models models/s,models/m --task arithmetic*",
    "ftis-node export --home homes/s --out models/s-trained",
    "openssl rand -hex 32 > swarm.secret",
    "chmod 600 swarm.secret",
)
ENDLESS = "--watch"
SHOWN = [one for one in chain.from_iterable(map(commands, PAGES)) if not one.is_inline and ENDLESS not in one.words]
FOUND = {pattern: [one for one in SHOWN if fnmatchcase(one.text, pattern)] for pattern in PATTERNS}
RUN = list({command.words: command for found in FOUND.values() for command in found}.values())
QUERIES = [command for command in RUN if command.words[:2] not in (JOIN, BOOTSTRAP)]


PLACEHOLDERS = {"--model", "--peers", "--home", "--steps"}  # readers choose these values


@dataclass(frozen=True)
class Nodes:
    """The small swarm, whose `node` gets the commands, and one node on the example's task."""

    swarm: SmallSwarm
    sorting: RunningNode
    folder: Path
    peer: str = field(default_factory=lambda: Identity.generate().peer_id)
    """The id of a peer outside the swarm, to ban and to trust."""

    @property
    def node(self) -> RunningNode:
        return self.swarm.bob


def _command(start: tuple[str, ...], *words: str) -> Command:
    """Return the one documented command that begins like this and has these words."""
    (found,) = [one for one in RUN if one.words[: len(start)] == start and set(words) <= set(one.words)]
    return found


def _filled(words: tuple[str, ...], nodes: Nodes) -> list[str]:
    """Return a command line with values of this swarm for the placeholders of the page."""
    models = [str(nodes.swarm.models[size]) for size in ("s", "m")]
    values = {
        "--model": models[0],
        "--models": ",".join(models),
        "--peers": nodes.swarm.address,
        "--out": str(nodes.folder / "out"),
        "--limit": "4",
    }
    named = {"PEER": nodes.peer, "PEER_ID": nodes.peer}
    filled = [named.get(word, word) for word in words]
    if "ID" in filled:
        filled[filled.index("ID")] = str(nodes.node.events("admitted")[0]["group"])
    for at, word in enumerate(filled[:-1]):
        filled[at + 1] = values.get(word, filled[at + 1])
    if filled[1] == "export":
        nodes.sorting.wait(timeout_s=STEP_S)
        return _at_home(filled, nodes.sorting.home)
    return _at_home(filled, nodes.node.home)


def _at_home(words: list[str], home: Path) -> list[str]:
    """Return the command line with this home, if the command has the option."""
    if "--home" in words:
        words[words.index("--home") + 1] = str(home)
        return words
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    has_home = any("--home" in option.opts for option in command.params)
    return [*words, "--home", str(home)] if has_home else words


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line with their values."""
    return {word: value for word, value in pairwise(words) if word.startswith("--")}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, small_swarm: SmallSwarm, example_plugin: Path) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("documented")
    example = _command(JOIN, "examples/ftis-node-task-sorting/run.toml")
    own_run = str(ROOT / _options(example.words)["--run"])
    given = _options(example.words[2:]) | {"--model": str(save_tiny(folder / "model", seed=5)), "--run": own_run}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([str(example_plugin), str(ROOT)]))
        with started(folder / "sorting", "join", *chain.from_iterable(given.items()), "--listen", ANY_PORT) as sorting:
            yield Nodes(small_swarm, sorting, folder)


def test_every_pattern_matches_a_command_of_a_page() -> None:
    assert [pattern for pattern, found in FOUND.items() if not found] == []


def test_the_swarm_is_started_with_the_documented_commands(small_swarm: SmallSwarm) -> None:
    for command, node in ((_command(JOIN, "ADDRESS"), small_swarm.bob), (_command(BOOTSTRAP), small_swarm.bootstrap)):
        words = [str(word) for word in node.process.args]  # type: ignore[union-attr]  # a list
        documented, given = _options(command.words), _options(words)
        assert words[words.index("ftis_node") + 1] == command.words[1]
        assert (
            documented.items() <= (given | {name: documented[name] for name in PLACEHOLDERS & set(documented)}).items()
        )
        assert PLACEHOLDERS & set(documented) <= set(given)


@pytest.mark.parametrize("command", QUERIES, ids=lambda command: command.text)
def test_a_documented_command_succeeds_and_prints_something(
    command: Command,
    nodes: Nodes,
    example_plugin: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(nodes.folder)
    monkeypatch.syspath_prepend(example_plugin)
    if command.words[0] != "ftis-node":
        subprocess.run(["bash", "-ec", command.line.strip()], check=True)
        return
    if command.words[1:3] == ("peers", "show"):  # the node must know the peer
        assert run(["peers", "trust", nodes.peer, "--home", str(nodes.node.home)]) == 0
    code = run(_filled(command.words, nodes)[1:])
    captured = capfd.readouterr()
    assert (code, captured.err.count("Traceback")) == (0, 0), captured.err
    assert captured.out.strip()


def test_the_node_of_the_example_trains_a_step(nodes: Nodes) -> None:
    assert nodes.sorting.wait(timeout_s=STEP_S) == 0, nodes.sorting.log.read_text()[-2000:]
    status = nodes.sorting.status()
    assert (status["run"]["task"], status["learner"]["step"]) == ("sorting", 1)


def test_python_code_on_the_pages_runs(example_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(example_plugin), str(ROOT)]))
    shown = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert shown
    for block in shown:
        subprocess.run([sys.executable, "-c", "\n".join(block.lines)], check=True)
