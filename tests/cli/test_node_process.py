"""`ftis_node.Node` and the examples of the Python interface, with real nodes of tiny models."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import typer
from nbclient import NotebookClient

from ftis_node import Node
from ftis_node.cli import node_process
from ftis_node.cli.app import app
from ftis_node.cli.app import run as run_command
from ftis_node.cli.commands.join import join
from ftis_node.cli.node_process import OF_A_TERMINAL, _as_words
from ftis_node.errors import FtisError, UsageError
from tests.node.support import write_manifest
from tests.waiting import eventually

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
STEPS = 2
ALL_OPTIONS: Mapping[str, Any] = {
    "model": "org/m", "run": "r.toml", "task": "arithmetic", "eval_task": "sums", "peers": ["/ip4/1", "-2"],
    "no_peers": True, "role": "full", "follow": "p", "engine": "torch", "lora": False, "quantize": "4bit", "gpus": 2,
    "tensor_parallel": 2, "listen": ["/ip4/3"], "name": "-n", "seed": 1, "steps": 2, "generate_tokens": 3,
    "learn_tokens": 4, "track": ["wandb", "trackio"], "log_format": "json",
}  # fmt: skip


def example(name: str, *arguments: object) -> str:
    """Run an example and return its output."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose steps do not wait for peers."""
    return write_manifest(tmp_path_factory.mktemp("run") / "run.toml", foreign_wait_s=0.0)


@pytest.fixture(scope="module")
def watched(tmp_path_factory, tiny_models, run):
    """The home of a node that the example `watch_node.py` ran, and the example's output."""
    home = tmp_path_factory.mktemp("homes") / "s"
    return home, example("watch_node.py", tiny_models["s"], run, home, STEPS)


def test_the_options_equal_those_of_join():
    assert ALL_OPTIONS.keys() | OF_A_TERMINAL | {"home"} == inspect.signature(join).parameters.keys()
    command = typer.main.get_command(app).commands["join"]
    parsed = command.make_context("join", _as_words(ALL_OPTIONS)).params
    assert {name: parsed[name] for name in ALL_OPTIONS} == ALL_OPTIONS
    assert _as_words({"lora": True, "no_peers": False, "model": None}) == ["--lora"]
    with pytest.raises(TypeError, match="no option modle"):
        Node(home="h", modle="m")


@pytest.mark.parametrize("model", ["models/tiny", "models/mine/x.gguf"])
def test_a_relative_path_of_a_model_is_kept_absolute(tmp_path, monkeypatch, model):
    """In another folder, the file's path would name a repository of the hub."""
    kept = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ftis_node.cli.commands.join._run", lambda settings, *_: kept.append(settings.model))
    path = tmp_path / model
    if path.suffix:
        path.parent.mkdir(parents=True)
        path.touch()
    else:
        path.mkdir(parents=True)
    assert (run_command(["join", "--home", "home", "--model", model]), kept) == (0, [str(path)])


def test_a_script_watches_a_node_until_its_steps_are_done(watched):
    lines = watched[1].splitlines()
    assert lines[0].startswith("starting step 0"), lines
    assert lines[-1].startswith(f"stopped step {STEPS} "), lines


def test_a_script_reads_the_buffer(watched):
    header, _, row = example("read_buffer.py", watched[0]).splitlines()
    assert header.split() == ["count", "mean"]
    assert int(row.split()[1]) >= STEPS * 4 * 4  # groups a step, completions a group


def test_a_script_decodes_an_envelope(watched, tmp_path):
    export = ["replay", "export", "--home", watched[0], "--format", "envelope", "--out", tmp_path]
    subprocess.run([sys.executable, "-m", "ftis_node", *export], check=True)
    sender, *rewards = example("decode_envelope.py", next(tmp_path.glob("*.envelope"))).split()
    assert sender == example("read_buffer.py", watched[0]).splitlines()[2].split()[0]
    assert len(rewards) == 4


async def test_a_node_that_cannot_start_raises_its_last_line(tmp_path):
    with pytest.raises(UsageError, match=r"ended with exit code 2: ftis-node: folder .* has no config.json"):
        async with Node(home=tmp_path / "h", model=str(tmp_path)) as node:
            async for _ in node.watch():
                pass
    with pytest.raises(UsageError, match="started before"):
        await node.start()


def _handles_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_node_that_does_not_stop_is_killed(is_cancelled, tmp_path, tiny_models, run, monkeypatch):
    """A node under SIGSTOP runs no handler: it is killed at the limit, or at once if the caller is cancelled."""
    node = await Node(home=tmp_path / "h", model=tiny_models["s"], run=run, engine="torch").start()
    await eventually(lambda: _handles_sigterm(node.pid), within_s=120)
    os.kill(node.pid, signal.SIGSTOP)
    if not is_cancelled:
        monkeypatch.setattr(node_process, "STOP_LIMIT_S", 0.5)
    stopping = asyncio.create_task(node.stop())
    await asyncio.sleep(0.1)
    assert node.exit_code is None
    if is_cancelled:
        stopping.cancel()
    await asyncio.wait([stopping])
    assert (stopping.cancelled(), node.exit_code) == (is_cancelled, -signal.SIGKILL)


async def test_a_node_leaves_no_process(tmp_path, tiny_models, run):
    """The node ends with all its processes at the end of the block, at a cancellation, and after a kill."""
    home = tmp_path / "h"

    async with Node(home=home, model=tiny_models["s"], run=run, engine="torch") as node:
        async for status in node.watch(every_s=0.2):
            if status.node.state == "running":
                break
        processes = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        other = Node(home=home, model=tiny_models["s"], run=run, engine="torch")
        with pytest.raises(UsageError, match="in use by a running node"):
            await other.start()
            async for _ in other.watch():
                raise AssertionError("a status of another node")
    assert node.exit_code == 0 and not psutil.wait_procs(processes, timeout=5)[1]

    async def watch():
        async with Node(home=home, model=tiny_models["s"], run=run) as node:
            started.set_result(node.pid)
            async for _ in node.watch():
                pass

    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(watch())
    pid = await started
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert not psutil.pid_exists(pid)

    with pytest.raises(FtisError, match="signal 9"):
        async with Node(home=home, model=tiny_models["s"], run=run) as node:
            os.kill(node.pid, signal.SIGKILL)
            async for _ in node.watch():
                pass


def test_the_notebook_runs(tmp_path, tiny_models, run):
    notebook = nbformat.read(EXAMPLES / "watch_node.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"MODEL": tiny_models["s"], "RUN": run, "NODE_HOME": tmp_path / "h"}.items():
            environment.setenv(name, str(value))
        NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    printed = [output["text"] for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output]
    watched, stopped, rewards = printed
    assert int(watched.split()[0]) >= STEPS, watched
    assert (stopped, rewards.split()[:3]) == ("exit code 0\n", ["count", "mean", "sender"])
