"""Errors of a first start, in other processes than the test's.

Each error is one line that says what to do, with the documented exit code and no traceback. Errors that need no torch
are reported before it is loaded. One process runs these joins one by one and reports after each whether torch is
loaded. One node has the other faults: its bootstrap node does not run, its clock is wrong, its disk
is full for a while.
"""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.records.identity import Identity
from tests.http_server import serving
from tests.node.support import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_S = 240.0  # of a process on a busy machine

# The command, after Python code (the first argument) that changes what it sees of the machine.
ON_ANOTHER_MACHINE = """
import sys
exec(sys.argv[1])
from ftis_node.cli.app import run
code = run(sys.argv[2:])
print("torch loaded:", "torch" in sys.modules)
sys.exit(code)
"""
ONE_BY_ONE = """
import contextlib, io, json, sys
from ftis_node.cli.app import run
ended = {}
for name, arguments in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run(arguments)
    ended[name] = code, errors.getvalue(), "torch" in sys.modules
print(json.dumps(ended))
"""
WRONG_CLOCK = """
import time
real = time.time
time.time = lambda: real() + 5
"""


class Ended(NamedTuple):
    """The end of a command; `line` is its one error line."""

    code: int
    line: str
    loaded_torch: bool


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"} | changes


def command(*arguments: str, machine: str = "") -> list[str]:
    return [sys.executable, "-c", ON_ANOTHER_MACHINE, machine, *arguments]


def result_of(*arguments: str, prefix: tuple[str, ...] = (), **changes: str) -> Ended:
    done = subprocess.run(
        [*prefix, *command(*arguments)],
        capture_output=True, text=True, timeout=START_S, env=environment(**changes), check=False,
    )  # fmt: skip
    return Ended(done.returncode, error_line(done.stderr), "torch loaded: True" in done.stdout)


def error_line(stderr: str) -> str:
    assert "Traceback" not in stderr, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("ftis-node: ")]
    return line


def join_arguments(home: Path, *arguments: str) -> list[str]:
    return ["join", "--task", "arithmetic", "--home", str(home), "--listen", LOOPBACK, *arguments]


EARLY = {  # by the name of the home: options of a join that ends before torch is loaded, and texts of its error
    "misspelled folder": (["--model", "{model}x"], ["did you mean --model {model} ?"]),
    "no model": (["--model", "{folder}"], ["it is not a transformers model"]),
    "misspelled run": (["--model", "{model}", "--run", "arithmetic-ftsi"], ["did you mean arithmetic-ftis ?"]),
    "not on the hub": (["--model", "Qwen/Q-3BB"], ["the hub has no model Qwen/Q-3BB", "check the spelling"]),
    "listen": (
        ["--model", "{model}", "--listen", "/ip4/127.0.0.1/tcp/{port}"], ["{port}", "choose another with --listen"],
    ),
    "other run": (["--model", "{model}", "--run", "arithmetic-ftis"], ["belongs to run gsm8k-ftis", "--home"]),
    "other model": (["--model", "{model}"], ["trains Qwen2.5-3B, not this tiny-model: give another --home"]),
}  # fmt: skip


class EarlyErrors(NamedTuple):
    """The ends of these joins, and the values for the braces. Their homes are in `folder`."""

    ends: dict[str, Ended]
    values: dict[str, str]
    folder: Path


@pytest.fixture(scope="module")
def early(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("early")
    other_run, other_model = Home(folder / "other run"), Home(folder / "other model")
    other_run.root.mkdir()
    other_run.run_toml.write_text(load_manifest("gsm8k-ftis").to_toml())
    checkpoint = other_model.checkpoints / "step-00000012"
    checkpoint.mkdir(parents=True)
    run_id = load_manifest("arithmetic-ftis").run_id
    owner = {"run_id": run_id, "model": "Qwen2.5-3B", "model_fingerprint": "0" * 32, "trains": "full"}
    (checkpoint / "state.json").write_text(json.dumps({"owner": owner}))
    (checkpoint / "COMPLETE").touch()
    with socket.socket() as taken, serving(lambda path: (401, {"X-Error-Code": "RepoNotFound"}, b"")) as hub:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {"model": str(model), "folder": str(folder), "port": str(taken.getsockname()[1])}
        commands = {
            name: join_arguments(folder / name, *(option.format(**values) for option in options))
            for name, (options, _) in EARLY.items()
        }
        done = subprocess.run(
            [sys.executable, "-c", ONE_BY_ONE, json.dumps(commands)],
            capture_output=True, text=True, timeout=START_S, check=True,
            env=environment(HF_ENDPOINT=hub, HF_HOME=str(folder / "cache"), HF_HUB_OFFLINE="0"),
        )  # fmt: skip
    ends = json.loads(done.stdout)
    return EarlyErrors(
        {name: Ended(code, error_line(errors), torch) for name, (code, errors, torch) in ends.items()}, values, folder
    )


@pytest.mark.parametrize("name", EARLY)
def test_an_early_error_says_what_to_do(early, name):
    result = early.ends[name]
    assert (result.code, result.loaded_torch) == (2, False)
    for text in EARLY[name][1]:
        assert text.format(**early.values) in result.line


def test_a_failed_join_neither_creates_nor_changes_a_home(early):
    assert not (early.folder / "misspelled folder").exists()
    assert (early.folder / "other run" / "run.toml").read_text() == load_manifest("gsm8k-ftis").to_toml()


def small_disk(folder: Path, num_mb: int, *, fill_first: bool) -> tuple[str, ...]:
    """Return a prefix that gives a command a file system of this size in `folder`, or skip the test.

    A user namespace allows the mount without rights.
    """
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("the system does not allow `unshare -rm` (user namespaces)")
    folder.mkdir()
    fill = f"dd if=/dev/zero of={folder}/others bs=1k status=none 2>/dev/null;" if fill_first else ""
    script = f'mount -t tmpfs -o size={num_mb}m tmpfs "{folder}" && {{ {fill} exec "$@"; }}'
    return ("unshare", "-rm", "bash", "-c", script, "bash")


@pytest.mark.parametrize("fill_first", [True, False])
def test_a_disk_that_is_full_at_the_start_is_an_error(tmp_path, model, fill_first):
    prefix = small_disk(tmp_path / "disk", 20, fill_first=fill_first)
    result = result_of(*join_arguments(tmp_path / "disk" / "home", "--model", str(model)), prefix=prefix)
    assert result.code == 3
    assert ("the disk is full" if fill_first else "MB are needed") in result.line
    assert "free disk space" in result.line and not result.loaded_torch


class NodeRun(NamedTuple):
    """A node from its start to a full disk and its end: its lines, a second start on its home, its status."""

    lines: list[str]
    second: Ended
    status: str
    code: int
    home: Path


@pytest.fixture(scope="module")
def node_run(tmp_path_factory, model):
    """One node: its bootstrap node starts late, its clock is 5 s ahead, and its disk becomes full for a while."""
    folder = tmp_path_factory.mktemp("life")
    prefix = small_disk(folder / "disk", 48, fill_first=False)
    home, port = folder / "disk" / "home", free_port()
    bootstrap_home = folder / "bootstrap_home"
    bootstrap_home.mkdir()
    peer = f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.load_or_create(bootstrap_home / 'identity.key').peer_id}"
    arguments = (
        "join", "--model", str(model), "--task", "arithmetic", "--home", str(home), "--engine", "torch",
        "--listen", LOOPBACK, "--peers", peer,
    )  # fmt: skip
    log, others = folder / "node.log", []

    def wait_for(text):
        wait_until(lambda: text in log.read_text(), within_s=START_S)

    with log.open("wb") as stderr:
        node = subprocess.Popen([*prefix, *command(*arguments, machine=WRONG_CLOCK)], stderr=stderr, env=environment())
    try:
        wait_for("no bootstrap peer answers")
        seen_home = Path(f"/proc/{node.pid}/root{home}")  # only the node's namespace has the file system
        inside = ("nsenter", "-U", "--preserve-credentials", "-m", "-t", str(node.pid))
        second = result_of(*arguments, prefix=inside)
        bootstrap = ("bootstrap", "--home", str(bootstrap_home), "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        others.append(
            subprocess.Popen(
                command(*bootstrap), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
            )
        )
        wait_for("off this machine's")
        status = subprocess.run(
            [*inside, *command("status", "--home", str(home))],
            capture_output=True, text=True, env=environment(), check=True,
        ).stdout  # fmt: skip
        descriptor = os.open(seen_home, os.O_RDONLY)  # keeps the file system after its last process ended
        fill_up(seen_home / "others")
        wait_for("paused: no generation and no pulls")
        (seen_home / "others").unlink()
        wait_for("resumed: there is disk space again")
        node.send_signal(signal.SIGTERM)
        code = node.wait(START_S)
        shutil.copytree(f"/proc/self/fd/{descriptor}", folder / "left", ignore=shutil.ignore_patterns("others", "run"))
        os.close(descriptor)
        return NodeRun(log.read_text().splitlines(), second, status, code, folder / "left")
    finally:
        for process in (node, *others):
            process.send_signal(signal.SIGKILL if process is node else signal.SIGTERM)
            process.wait(20)


def fill_up(path: Path) -> None:
    """Fill the file system."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 10):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_the_first_lines_describe_the_start_and_name_the_dashboard(node_run):
    text = "\n".join(node_run.lines)
    for part in ("generates with and trains tiny-model (", "run       arithmetic-ftis (", "no other file leaves"):
        assert part in text
    assert "watch     ftis-node dashboard --home" in text
    assert "ftis_node." not in text, "a line for users has no names of modules"


def test_an_unreachable_bootstrap_node_is_reported_and_dialed_again(node_run):
    (first, *_) = [line for line in node_run.lines if "no bootstrap peer answers" in line]
    assert "working alone" in first and "connection refused" in first
    assert "ftis-node doctor --peers" in first
    assert any("1 peer connected, but no member of this run yet" in line for line in node_run.lines)


def test_two_clocks_that_differ_are_reported_and_neither_is_called_wrong(node_run):
    (line,) = [line for line in node_run.lines if "the clock of peer" in line]
    assert re.search(r"is -[45] s off this machine's: one of the two is wrong", line)
    assert "switch on time synchronization" not in node_run.status


def test_a_second_start_on_the_same_home_is_an_error(node_run):
    assert node_run.second.code == 2
    assert "is in use by a running node (pid" in node_run.second.line
    assert not node_run.second.loaded_torch


def test_a_full_disk_pauses_the_node_without_loss_of_groups(node_run):
    assert node_run.code == 0
    (line,) = [line for line in node_run.lines if "paused: " in line]
    assert "the disk is full" in line
    home = Home(node_run.home)
    events = [json.loads(line) for line in home.events.read_text().splitlines()]
    admitted = {event["group"] for event in events if event["event"] == "admitted"}
    assert admitted
    with sqlite3.connect(home.replay) as buffer:
        assert buffer.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = {row[0].hex() for row in buffer.execute("SELECT id FROM groups")}
    used = {event["group"] for event in events if event["event"] == "taken"}
    assert admitted <= kept | used, "a group that no step used is gone"
    assert Identity.load_or_create(home.identity).peer
    assert home.run_toml.read_text() == load_manifest("arithmetic-ftis").to_toml()
