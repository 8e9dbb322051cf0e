"""Commands of ftis-node as child processes, whose output is in files."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ftis_node.errors import FtisError

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
STOP_GRACE_S = 12.0
END_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A running command. `log` holds its stderr, `out` its stdout."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def wait_for_line(self, *, timeout_s: float) -> str:
        """Return the first line of its stdout. Raises FtisError if it ends or prints nothing in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            text = self.out.read_text()
            if "\n" in text:
                return text.splitlines()[0]
            if self.exit_code is not None:
                raise FtisError(f"{self.name} ended with exit code {self.exit_code}: {self.last_words()}")
            time.sleep(END_POLL_S)
        raise FtisError(f"{self.name} said nothing for {timeout_s:.0f} s: {self.last_words()}")


class ChildProcesses:
    """Starts commands. `environment` is theirs; None: that of this process."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self._logs, self._env = logs, environment
        self._children: list[ChildProcess] = []

    def start(self, name: str, *arguments: str) -> ChildProcess:
        out, log = self._logs / f"{name}.out", self._logs / f"{name}.log"
        with out.open("wb") as stdout, log.open("wb") as stderr:
            command = [sys.executable, "-m", "ftis_node", *arguments]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=self._env)
        child = ChildProcess(name, process, out, log)
        self._children.append(child)
        return child

    def bootstrap(self, home: Path) -> ChildProcess:
        """Start a bootstrap node on the loopback interface; the first line of its output is its address."""
        return self.start("bootstrap", "bootstrap", "--home", str(home), "--listen", ANY_PORT)

    def join(self, name: str, *, home: Path, peer: str, **options: object) -> ChildProcess:
        """Start a node on the loopback interface that joins `peer`. `options` are its other options."""
        options = {"home": home, "peers": peer, "listen": ANY_PORT, "name": name, **options}
        words = ((f"--{key}",) if value is True else (f"--{key}", str(value)) for key, value in options.items())
        return self.start(name, "join", *chain.from_iterable(words))

    def stop(self) -> None:
        """Stop the commands that still run: SIGTERM, then SIGKILL after `STOP_GRACE_S`."""
        running = [child for child in self._children if child.exit_code is None]
        for child in running:
            child.process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        for child in running:
            try:
                child.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


@contextmanager
def children(logs: Path, environment: Mapping[str, str] | None = None) -> Iterator[ChildProcesses]:
    logs.mkdir(parents=True, exist_ok=True)
    started = ChildProcesses(logs, environment)
    try:
        yield started
    finally:
        started.stop()
