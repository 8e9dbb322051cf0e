"""A closed terminal (SIGHUP) ends a node like SIGTERM, unless `nohup` started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from ftis_node.config.home import Home
from ftis_node.node.storage.disk_space import checkpoint_step
from tests.node.support import ANY_PORT, started, write_manifest

START_S = 240.0
WORKS = """
import asyncio, logging, os, signal
from ftis_node.node.supervision.background import until_signalled
async def work():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.5)
        print("continues")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        print("saved")
logging.basicConfig(level="INFO", format="%(message)s")
asyncio.run(until_signalled(work()))
"""


@pytest.mark.parametrize(
    ("prefix", "out", "err"),
    [((), "saved\n", "SIGHUP: stopping\n"), (("nohup",), "continues\nsaved\n", "SIGTERM: stopping\n")],
    ids=["plain", "nohup"],
)
def test_a_hang_up_stops_in_order_and_nohup_is_respected(prefix: tuple[str, ...], out: str, err: str) -> None:
    command = (*prefix, sys.executable, "-c", WORKS)
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr.replace("nohup: ignoring input\n", "")) == (0, out, err)


@pytest.mark.timeout(600)
def test_a_node_whose_terminal_closes_saves_and_leaves_no_process(
    tmp_path: Path, tiny_models: Mapping[str, Path]
) -> None:
    """The kernel sends the signal to each process of the terminal's process group."""
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0)
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT)
    with started(tmp_path / "node", *join, on=("setsid",)) as node:
        node.wait_for(lambda: len(node.events("step")) >= 2, timeout_s=START_S)
        family = node.processes()
        os.killpg(node.process.pid, signal.SIGHUP)
        assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        assert node.status()["node"]["end"] == "stopped"
    log = node.log.read_text()
    assert "SIGHUP: stopping" in log and "stopped" in log.split("SIGHUP: stopping", 1)[1]
    assert checkpoint_step(Home(node.home)) >= node.events("step")[-1]["step"], "the newest step is not saved"
