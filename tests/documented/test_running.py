"""The documented commands that take less than a minute on a CPU run on the small swarm.

`_filled` replaces placeholders by addresses, homes and models of this swarm, and reduces the number of problems.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import typer

from ftis_node.cli.app import app, run
from ftis_node.records.identity import Identity
from tests.documented.pages import PAGES, ROOT, Command, blocks, commands
from tests.models.tiny_models import save_tiny
from tests.node.support import ANY_PORT, started
from tests.small_swarm import SmallSwarm

pytestmark = pytest.mark.timeout(600)
STEP_S = 400.0  # for the example's one step on a loaded machine

JOIN, BOOTSTRAP = ("ftis-node", "join"), ("ftis-node", "bootstrap")
PATTERNS = (  # words in capitals are replaced
    "ftis-node join --model models/s --task arithmetic --peers ADDRESS --home homes/s --engine torch --steps 10",
    "ftis-node join --model DIR --run examples/ftis-node-task-sorting/run.toml --steps 1",
    "ftis-node bootstrap --home homes/bootstrap",
    "ftis-node status*",
    "ftis-node peers*",
    "ftis-node replay list*",
    "ftis-node replay stats*",
    "ftis-node replay show*",
    "ftis-node tasks*",
    "ftis-node eval --model models/s --task arithmetic*",
    "ftis-node eval --model models/s-trained --compare models/s --task arithmetic*",
    "ftis-node ensemble --models models/s,models/m --task arithmetic*",
    "ftis-node try *",
    "ftis-node export --home homes/s --out models/s-trained",
    "openssl rand -hex 32 > swarm.secret",
    "chmod 600 swarm.secret",
)
SHOWN = [one for one in chain.from_iterable(map(commands, PAGES)) if not one.is_inline]
FOUND = {pattern: [one for one in SHOWN if fnmatchcase(one.text, pattern)] for pattern in PATTERNS}
RUN = list({command.words: command for found in FOUND.values() for command in found}.values())
QUERIES = [command for command in RUN if command.words[:2] not in (JOIN, BOOTSTRAP)]


OUTSIDER = Identity.generate().peer_id  # a peer outside the swarm, to ban and to trust
PLACEHOLDERS = {"--model", "--peers", "--home", "--steps"}  # readers choose these values


def _command(start: tuple[str, ...], *words: str) -> Command:
    """Return the one documented command that begins like this and has these words."""
    (found,) = [one for one in RUN if one.words[: len(start)] == start and set(words) <= set(one.words)]
    return found


def _filled(words: tuple[str, ...], swarm: SmallSwarm, folder: Path) -> list[str]:
    """Return a command line with values of this swarm for the placeholders of the page."""
    models = [str(swarm.models[size]) for size in ("s", "m")]
    values = {
        "--model": models[0], "--models": ",".join(models), "--compare": models[1], "--peers": swarm.address,
        "--out": str(folder / "out"), "--limit": "4",
    }  # fmt: skip
    filled = [OUTSIDER if word in ("PEER", "PEER_ID") else word for word in words]
    if "ID" in filled:
        filled[filled.index("ID")] = str(swarm.bob.events("admitted")[0]["group"])
    for at, word in enumerate(filled[:-1]):
        filled[at + 1] = values.get(word, filled[at + 1])
    if "--home" in filled:
        filled[filled.index("--home") + 1] = str(swarm.bob.home)
        return filled
    command: Any = typer.main.get_command(app)
    for word in filled[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    has_home = any("--home" in option.opts for option in command.params)
    return [*filled, "--home", str(swarm.bob.home)] if has_home else filled


def _options(words: Sequence[str]) -> dict[str, str]:
    return {word: value for word, value in pairwise(words) if word.startswith("--")}


def test_every_pattern_matches_a_command_of_a_page():
    assert [pattern for pattern, found in FOUND.items() if not found] == []


def test_the_swarm_is_started_with_the_documented_commands(small_swarm):
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
    command, small_swarm, example_plugin, example_episode, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    for folder in (example_plugin, example_episode):
        monkeypatch.syspath_prepend(folder)
    if command.words[0] != "ftis-node":
        Path("swarm.secret").touch()
        subprocess.run(["bash", "-ec", command.line.strip()], check=True)
        return
    if command.words[1:3] == ("peers", "show"):  # the node must know the peer
        assert run(["peers", "trust", OUTSIDER, "--home", str(small_swarm.bob.home)]) == 0
    code = run(_filled(command.words, small_swarm, tmp_path)[1:])
    captured = capfd.readouterr()
    assert (code, captured.err.count("Traceback")) == (0, 0), captured.err
    assert captured.out.strip()


def test_the_node_of_the_example_trains_a_step(tmp_path, example_plugin, monkeypatch):
    example = _command(JOIN, "examples/ftis-node-task-sorting/run.toml")
    own_run = str(ROOT / _options(example.words)["--run"])
    given = _options(example.words[2:]) | {"--model": str(save_tiny(tmp_path / "model", seed=5)), "--run": own_run}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(example_plugin), str(ROOT)]))
    with started(tmp_path / "sorting", "join", *chain.from_iterable(given.items()), "--listen", ANY_PORT) as sorting:
        assert sorting.wait(timeout_s=STEP_S) == 0, sorting.log.read_text()[-2000:]
        status = sorting.status()
    assert (status["run"]["task"], status["learner"]["step"]) == ("sorting", 1)


def test_python_code_on_the_pages_runs(example_plugin, small_swarm, tmp_path):
    """All blocks run in one process, each with its own names, beside the rollouts that a page exports."""
    rollouts = tmp_path / "rollouts.parquet"
    export = ["replay", "export", "--text", "--flat", "--format", "parquet", "--out", str(rollouts)]
    assert run([*export, "--home", str(small_swarm.bob.home)]) == 0
    shown = ["\n".join(one.lines) for page in PAGES for one in blocks(page) if one.language == "python"]
    assert shown
    path = os.pathsep.join([str(example_plugin), str(ROOT)])
    program = f"for block in {shown!r}: exec(block, {{'__name__': '__main__'}})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert not {"sender", "sender_name"} & set(pyarrow.parquet.read_schema(rollouts).names)
