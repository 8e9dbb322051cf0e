"""A learner on two hosts: the node's worker in one network namespace, `ftis-node learner-host` in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from learner_rig import make_boot
from tiny_models import save_tiny

import ftis_node
from ftis_node.config.workers import LearnerSection
from ftis_node.telemetry.events import read_events
from ftis_node.workers.wire import enc_hook
from tests.network.conftest import internet as internet  # a fixture
from tests.node.support import write_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.network.hosts import Host, Internet


ROOT = Path(ftis_node.__file__).parents[1]
PORT = 29400
LIMIT_S = 900
LINE_WITHIN_S = 200.0
HOST_TIMEOUT_S = 20.0  # a process that imports torch on a loaded machine is silent for several seconds
PYTHON_PATH = ":".join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/learner", ROOT / "tests/learner/distributed")))
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}


class Program:
    """A process on a host, with the lines of its standard output and error."""

    def __init__(self, host: Host | None, *command: str) -> None:
        line = list(command) if host is None else host.inside(*command)
        self.process = subprocess.Popen(
            line, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._queue: Queue[str] = Queue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, *wanted: str) -> str:
        """Return the next line that contains all of `wanted`."""
        while True:
            try:
                line = self._queue.get(timeout=LINE_WITHIN_S)
            except Empty:
                raise AssertionError(f"no line with {wanted} in:\n{''.join(self.lines)}") from None
            assert line, f"ended without a line with {wanted}:\n{''.join(self.lines)}"
            if all(each in line for each in wanted):
                return line

    def step(self) -> dict[str, Any]:
        """Let the learner train its next step, and return its report or error."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while True:
            found: dict[str, Any] = json.loads(self.until("{"))
            if "loss" in found or "error" in found:
                return found

    def children(self) -> list[psutil.Process]:
        """Return all descendants of this process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        """End the process and its descendants."""
        family = self.children() if self.process.poll() is None else []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put("")


class Machines:
    """Two hosts, their programs, and the files that they share."""

    def __init__(self, internet: Internet, folder: Path) -> None:
        self.first, self.second = internet.host("first"), internet.host("second")
        self.folder = folder
        self.model = save_tiny(folder / "tiny")
        self.secret = folder / "secret"
        self.secret.write_text(os.urandom(32).hex())
        self.secret.chmod(0o600)
        self.programs: list[Program] = []

    def node(self, home: str, *, num_steps: int, host: Host | None = None, **settings: Any) -> Program:
        """Start the node's side, on a host or on this machine."""
        boot = make_boot(self.model, self.folder / home, micro_batch_tokens=60)
        section = LearnerSection(checkpoint_every_steps=1, **settings)
        boot = msgspec.structs.replace(boot, settings=section)
        text = json.dumps(msgspec.to_builtins(boot, enc_hook=enc_hook))
        (self.folder / home).mkdir(exist_ok=True)
        program = str(Path(__file__).with_name("host_program.py"))
        return self.start(host, sys.executable, program, text, str(self.folder / home), str(num_steps))

    def node_of_two(self, home: str, *, num_steps: int, **settings: Any) -> Program:
        """Start the node's side of a learner on two hosts."""
        channel = {"hosts": 2, "rendezvous": f"{self.first.address}:{PORT}", "rendezvous_secret_file": str(self.secret)}
        return self.node(
            home, num_steps=num_steps, host=self.first, **channel | {"host_timeout_s": HOST_TIMEOUT_S} | settings
        )

    def other(self, *options: str, secret: Path | None = None, host: Host | None = None) -> Program:
        """Start `ftis-node learner-host`, by default on the second host."""
        command = (sys.executable, "-m", "ftis_node", "learner-host", "--rendezvous", f"{self.first.address}:{PORT}")
        secret_file = str(secret or self.secret)
        return self.start(host or self.second, *command, "--secret-file", secret_file, "--threads", "1", *options)

    def start(self, host: Host | None, *command: str) -> Program:
        self.programs.append(Program(host, *command))
        return self.programs[-1]


@pytest.fixture
def machines(internet: Internet, tmp_path: Path) -> Iterator[Machines]:
    """Return two hosts. The programs that a test starts on them end with the test."""
    made = Machines(internet, tmp_path)
    try:
        yield made
    finally:
        for program in made.programs:
            program.close()


@pytest.mark.timeout(LIMIT_S)
def test_two_hosts_equal_two_ranks_of_one_host_bit_for_bit(machines: Machines) -> None:
    alone = machines.node("alone", num_steps=3, processes=2)
    expected = [alone.step() for _ in range(3)]
    node = machines.node_of_two("together", num_steps=3)
    assert json.loads(node.until("HostsConnected"))["num_connected"] == 1
    other = machines.other()
    assert json.loads(node.until("HostsConnected"))["num_connected"] == 2
    assert [node.step() for _ in range(3)] == expected
    assert (node.process.wait(60), other.process.wait(60)) == (0, 0), other.lines
    for home in ("weights", "checkpoints/step-00000003"):
        files = sorted((machines.folder / "alone" / home).rglob("*.safetensors"))
        assert files
        for file in files:
            twin = machines.folder / "together" / file.relative_to(machines.folder / "alone")
            assert twin.read_bytes() == file.read_bytes(), twin
    assert "the node has ended" in "".join(other.lines)


@pytest.mark.timeout(LIMIT_S)
def test_a_killed_host_is_named_and_the_learner_resumes_when_it_returns(machines: Machines) -> None:
    alone = machines.node("alone", num_steps=2, processes=2)
    expected = [alone.step() for _ in range(2)]
    node, other = machines.node_of_two("together", num_steps=2), machines.other()
    assert node.step() == expected[0]
    ranks = other.children()
    assert len(ranks) == 1
    other.process.send_signal(signal.SIGKILL)
    failed = node.step()
    assert "host 2 of 2 of the learner" in failed["error"]
    assert "is lost: no heartbeat" in failed["error"]
    assert not any(rank.is_running() for rank in ranks)
    node.until("HostsConnected", '"num_connected": 1')
    machines.other()
    assert json.loads(node.until("restarts")) == {"step": 1, "restarts": 1}
    assert node.step() == expected[1]


@pytest.mark.timeout(LIMIT_S)
def test_an_unreachable_host_is_lost_and_rejoins_when_it_is_reachable(machines: Machines, internet: Internet) -> None:
    node, other = machines.node_of_two("together", num_steps=2), machines.other()
    assert "loss" in node.step()
    internet.cut([machines.first], [machines.second])
    failed = node.step()
    assert "host 2 of 2 of the learner" in failed["error"]
    other.until("no heartbeat from the node")
    internet.heal()
    assert json.loads(node.until("restarts")) == {"step": 1, "restarts": 1}
    assert "loss" in node.step()


@pytest.mark.timeout(LIMIT_S)
def test_torchrun_on_both_hosts_runs_one_node(machines: Machines, tiny_models: Mapping[str, Path]) -> None:
    """The test runs torchrun with `ftis-node join` and `ftis-node learner-host`. The second host has no home."""
    home, model = machines.folder / "home", str(tiny_models["s"])
    run = write_manifest(machines.folder / "run.toml", foreign_wait_s=0.5)
    command = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    command = (*command, "--master-addr", machines.first.address, "-m", "ftis_node.learner.distributed.torchrun")
    join = ("join", "--model", model, "--run", str(run), "--home", str(home), "--engine", "torch", "--steps", "2")
    join = (*join, "--listen", machines.first.listen)
    node, other = (
        machines.start(host, *command[:7], "--node-rank", str(number), *command[7:], "--", "--secret-file",
                       str(machines.secret), *join)
        for number, host in enumerate((machines.first, machines.second))
    )  # fmt: skip
    node.until("learner: waiting for 1 of 2 hosts at", machines.first.address)
    node.until("learner: all 2 hosts are connected")
    other.until("host 2 of 2: ranks 1 to 1 start")
    other.until("the node has ended")
    assert (node.process.wait(LINE_WITHIN_S), other.process.wait(LINE_WITHIN_S)) == (0, 0), node.lines
    steps = read_events(home / "events.jsonl", name="step")
    assert [event["step"] for event in steps] == [1, 2]
    assert (home / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.timeout(LIMIT_S)
def test_a_host_with_another_secret_finds_no_node_and_the_node_ends(machines: Machines) -> None:
    wrong = machines.folder / "wrong"
    wrong.write_text(os.urandom(32).hex())
    wrong.chmod(0o600)
    node = machines.node_of_two("together", num_steps=1, rendezvous_timeout_s=12.0)
    other = machines.other("--timeout-s", "8", secret=wrong)
    other.until("no node answers at", "for 8 s")
    assert other.process.wait(30) == 4
    failed = json.loads(node.until("error"))
    assert failed["kind"] == "NetworkError"
    assert "the learner has 1 of 2 hosts after 12 s" in failed["error"]


@pytest.mark.timeout(LIMIT_S)
def test_a_host_with_another_model_of_the_same_form_is_refused(machines: Machines) -> None:
    another = save_tiny(machines.folder / "another", tied=False)
    node = machines.node_of_two("together", num_steps=1)
    other = machines.other("--model", str(another))
    other.until("holds another model than the node's tiny")
    assert other.process.wait(30) == 2
    failed = json.loads(node.until("error"))
    assert (failed["kind"], "host 2 of 2 of the learner" in failed["error"]) == ("ConfigError", True)
