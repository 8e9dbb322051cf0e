"""The documented commands that a CPU can run in a minute are run, on one small swarm that all of them share.

What a reader fills in is filled in (`_filled`): the addresses, homes and models of this swarm, and fewer problems.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import typer

from ftis_node.cli.app import app, run
from tests.documented.pages import PAGES, ROOT, blocks, commands
from tests.documented.table import is_run
from tests.models.tiny_models import save_tiny
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.documented.pages import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOIN, BOOTSTRAP = ("ftis-node", "join"), ("ftis-node", "bootstrap")
SHOWN = [command for command in chain.from_iterable(map(commands, PAGES)) if not command.is_inline]
RUN = list({command.words: command for command in SHOWN if is_run(command.text)}.values())
ASKING = [command for command in RUN if command.words[:2] not in (JOIN, BOOTSTRAP)]


@dataclass(frozen=True)
class Swarm:
    """A meeting point, the node of the quickstart, which has done a step, and one on the example's task."""

    folder: Path
    address: str
    node: RunningNode
    sorting: RunningNode

    @property
    def peer(self) -> str:
        """Somebody to ban and to trust."""
        return self.address.rsplit("/", 1)[1]

    @property
    def model(self) -> Path:
        return self.folder / "model"


def _the(start: tuple[str, ...], *having: str) -> Command:
    """The one documented command that begins so and has these words."""
    (found,) = [one for one in RUN if one.words[: len(start)] == start and set(having) <= set(one.words)]
    return found


def _filled(words: tuple[str, ...], swarm: Swarm) -> list[str]:
    """A command line with what this swarm has in place of what the page leaves open."""
    values = {
        "--model": str(swarm.model),
        "--models": f"{swarm.model},{swarm.model}",
        "--peers": swarm.address,
        "--out": str(swarm.folder / "out"),
        "--limit": "4",
    }
    named = {"PEER": swarm.peer, "PEER_ID": swarm.peer}
    filled = [named.get(word, word) for word in words]
    if "ID" in filled:
        filled[filled.index("ID")] = str(swarm.node.events("admitted")[0]["group"])
    for at, word in enumerate(filled[:-1]):
        filled[at + 1] = values.get(word, filled[at + 1])
    if filled[1] == "export":  # a random model is never right, so the running node has nothing to save before its end
        swarm.sorting.wait(timeout_s=150)
        return _at_home(filled, swarm.sorting.home)
    return _at_home(filled, swarm.node.home)


def _at_home(words: list[str], home: Path) -> list[str]:
    """The same with this home, where the command takes one."""
    if "--home" in words:
        words[words.index("--home") + 1] = str(home)
        return words
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    has_home = any("--home" in option.opts for option in command.params)
    return [*words, "--home", str(home)] if has_home else words


def _joining(command: Command, folder: Path, **values: str) -> list[str]:
    """A documented `join` with these values, without its home, on ports of its own."""
    words = list(command.words[1:])
    if "--home" in words:
        del words[words.index("--home") : words.index("--home") + 2]
    for option, value in {"model": str(folder / "model"), **values}.items():
        words[words.index(f"--{option}") + 1] = value
    return [*words, "--listen", ANY_PORT, "--status-port", "0"]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, example_plugin: Path) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("documented")
    save_tiny(folder / "model", seed=5)
    manifest = write_manifest(folder / "run.toml", patience_s=1)
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.setenv("PYTHONPATH", os.pathsep.join([str(example_plugin), str(ROOT)]))
        example = _the(JOIN, "examples/ftis-node-task-sorting/run.toml")
        own_run = str(ROOT / example.words[example.words.index("--run") + 1])
        sorting = stack.enter_context(started(folder / "sorting", *_joining(example, folder, run=own_run)))
        meeting = [word for word in _the(BOOTSTRAP).words[1:] if word not in ("--home", "homes/meeting")]
        address = stack.enter_context(started(folder / "meeting", *meeting, "--listen", ANY_PORT)).first_line()
        words = _joining(_the(JOIN, "ADDRESS"), folder, peers=address, steps="1000")
        node = stack.enter_context(started(folder / "node", *words, "--run", str(manifest)))
        node.wait_for(lambda: len(node.events("step")) > 1, timeout_s=150)
        yield Swarm(folder, address, node, sorting)
        assert node.stop() < 10, "SIGTERM ends a node within ten seconds"


@pytest.mark.parametrize("command", ASKING, ids=lambda command: command.text)
def test_a_documented_command_does_what_it_should(
    command: Command,
    swarm: Swarm,
    example_plugin: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(swarm.folder)
    monkeypatch.syspath_prepend(example_plugin)
    if command.words[0] != "ftis-node":
        subprocess.run(["bash", "-ec", command.line.strip()], check=True)
        return
    if command.words[1:3] == ("peers", "show"):  # of somebody that the node has heard of
        assert run(["peers", "trust", swarm.peer, "--home", str(swarm.node.home)]) == 0
    code = run(_filled(command.words, swarm)[1:])
    captured = capfd.readouterr()
    assert (code, captured.err.count("Traceback")) == (0, 0), captured.err
    assert captured.out.strip(), "it says something"


def test_the_example_task_is_trained_on(swarm: Swarm) -> None:
    assert swarm.sorting.wait(timeout_s=150) == 0, swarm.sorting.log.read_text()[-2000:]
    status = swarm.sorting.status()
    assert (status["run"]["task"], status["learner"]["step"]) == ("sorting", 1)


def test_python_on_the_pages_runs(example_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(example_plugin), str(ROOT)]))
    shown = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert shown
    for block in shown:
        subprocess.run([sys.executable, "-c", "\n".join(block.lines)], check=True)
