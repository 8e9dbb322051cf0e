"""Runs the faults of all nodes in parallel: inject, wait for recovery, observe, check.

    schedule --faults of node a--> thread: inject, recover, observe, check --\
             --faults of node b--> thread: the same                        --+--> outcomes, as they arrive
             --faults of node c--> thread: the same                        --/

So the neighbors of a recovering node have faults at the same time. A violation is recorded at once: `violations/001-a/`
has a report, and the home and log of the node then.
"""

import os
import pprint
import queue
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.chaos.faults.base import Ends, Fault, FaultContext
from tests.chaos.faults.catalog import Planned
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import Violation
from tests.chaos.observation.watch import Observation, watch_of
from tests.chaos.swarm import POLL_S, START_S, STOP_S, Swarm, SwarmNode

ENDS_WITHIN_S = 60.0
RECOVERS_WITHIN_S = 300.0  # a busy machine starts a node slowly
NEW_STEPS = 2  # the first may have ended before the fault and been reported after it
MAX_COPIED = 6  # later records have the report only, because they often repeat the same violation
NOT_COPIED = shutil.ignore_patterns("run", "*.safetensors", "*.part", "identity.key", "*.token")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one fault.

    `recovered_s` counts from the end of the fault to two new steps; None means that they did not come in time.
    """

    planned: Planned
    notes: tuple[str, ...]
    fault_s: float
    recovered_s: float | None
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        """Return `3 kill-learner on b (pid 812): 0.0 s, recovered after 6.1 s` and a line for each violation."""
        notes = f" ({', '.join(self.notes)})" if self.notes else ""
        recovered = "not recovered" if self.recovered_s is None else f"recovered after {self.recovered_s:.1f} s"
        head = f"{self.planned.number:4} {self.planned.fault} on {self.planned.node}{notes}"
        lines = [f"{head}: {self.fault_s:.1f} s, {recovered}, load {os.getloadavg()[0]:.1f}"]
        return "\n".join([*lines, *(f"          VIOLATION {one}" for one in self.violations)])


class Runner:
    """Runs scheduled faults on a swarm, and records violations in its folder."""

    def __init__(self, swarm: Swarm, faults: Mapping[str, Fault]) -> None:
        self._swarm, self._faults = swarm, faults
        self._recording, self._num_records = threading.Lock(), 0
        with ThreadPoolExecutor() as threads:  # an observation mostly waits
            seen = threads.map(invariants.snapshot, swarm.nodes)
            self._seen = {node.name: one for node, one in zip(swarm.nodes, seen, strict=True)}

    def run_all(self, planned_by_node: Mapping[str, Iterable[Planned]], *, stop_after_s: float) -> Iterator[Outcome]:
        """Run the faults of each node in order, all nodes in parallel, and yield outcomes as they arrive.

        No fault begins after `stop_after_s`. An unexpected error is raised here, and then no new fault begins.
        """
        stop_at, results = time.monotonic() + stop_after_s, queue.SimpleQueue[Outcome | BaseException | None]()
        is_over = threading.Event()

        def run(planned_faults: Iterable[Planned]) -> None:
            try:
                for planned in planned_faults:
                    if is_over.is_set() or time.monotonic() > stop_at:
                        break
                    results.put(self.run(planned))
            except BaseException as error:
                results.put(error)  # the generator raises it
            else:
                results.put(None)

        for name, planned_faults in planned_by_node.items():
            threading.Thread(target=run, args=(planned_faults,), name=f"faults-{name}", daemon=True).start()
        num_running = len(planned_by_node)
        try:
            while num_running:
                outcome = results.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    num_running -= 1
                else:
                    yield outcome
        finally:
            is_over.set()

    def run(self, planned: Planned) -> Outcome:
        """Inject one fault, wait for recovery, and check the promise and the invariants."""
        fault, node = self._faults[planned.fault], self._swarm.node(planned.node)
        context, began_at = FaultContext(self._swarm, node, random.Random(planned.seed)), time.monotonic()
        problems = list[str]()
        if not node.is_running:
            problems.append(f"the node had ended before: {node.last_log_line()}")
            _restart(node)
        problems += _inject(fault, context)
        injected_at = time.monotonic()
        recovered_s = time.monotonic() - injected_at if _recovers(node, problems) else None
        violations = [Violation("promise", node.name, fault.name, problem) for problem in problems]
        before, seen = self._seen[node.name], invariants.snapshot(node)
        self._seen[node.name] = seen
        violations += invariants.check(before, seen, fault.name)
        self._record(node, violations, seen=(before, seen))
        return Outcome(planned, tuple(context.notes), injected_at - began_at, recovered_s, tuple(violations))

    def end(self) -> list[Violation]:
        """Stop every node in order and check the invariants over the whole run."""
        problems = {node.name: _stop(node) for node in self._swarm.nodes}
        found = [Violation("promise", name, "", problem) for name, problem in problems.items() if problem]
        found += invariants.check_end(self._swarm)
        for node in (*self._swarm.nodes, self._swarm.bootstrap):
            of_node = [violation for violation in found if violation.node in (node.name, invariants.ALL_NODES)]
            self._record(node, of_node, seen=watch_of(node).seen[-1:])
        return found

    def _record(self, node: SwarmNode, found: Sequence[Violation], *, seen: Sequence[Observation]) -> None:
        """Write these violations, the observations before and after, and the node's files at once; it continues."""
        if not found:
            return
        with self._recording:
            self._num_records += 1
            folder = self._swarm.folder / "violations" / f"{self._num_records:03}-{node.name}"
            folder.mkdir(parents=True)
            lines = [f"node {node.name} ({node.role})", *(f"VIOLATION {one}" for one in found)]
            lines += [pprint.pformat(replace(one, events=(), buffer=None), width=120) for one in seen]
            (folder / "report.txt").write_text("\n".join(lines) + "\n")
            if self._num_records <= MAX_COPIED:
                shutil.copyfile(node.process.log, folder / "node.log")
                with suppress(shutil.Error):  # files that disappear meanwhile
                    shutil.copytree(node.home, folder / "home", ignore=NOT_COPIED, symlinks=True)


def _inject(fault: Fault, context: FaultContext) -> list[str]:
    """Inject the fault, restart the node if it ended, and return each deviation from the promise."""
    node, first_pid, problems = context.node, context.node.pid, list[str]()
    try:
        fault.inject(context)
    except Exception as error:  # a fault that fails is a finding, and the run continues
        problems.append(f"{type(error).__name__}: {error}")
    if context.refusal is not None:
        problems += _check_refusal(context)
    elif fault.ends is Ends.CONTINUES and not (node.is_running and node.pid == first_pid):
        problems.append(f"the daemon ended: {node.last_log_line()}")
    elif fault.ends is Ends.RESTARTS and node.pid == first_pid and not _ends(node):
        problems.append(f"the daemon did not end in {ENDS_WITHIN_S:.0f} s")
    elif fault.ends is Ends.REFUSES and node.is_running:  # the injection failed; undoing needs a stopped node
        node.stop(signal.SIGKILL)
    context.undoing.close()
    if not node.is_running:
        node.start()
    return problems


def _recovers(node: SwarmNode, problems: list[str]) -> bool:
    """Wait for ready workers and for steps that began after the fault."""
    first: int | None = None

    def works() -> bool:
        nonlocal first
        done = node.progress()
        first = done if first is None else first
        return done is not None and first is not None and done >= first + NEW_STEPS and node.is_ready()

    if node.wait_for(works, timeout_s=RECOVERS_WITHIN_S):
        return True
    state = "runs" if node.is_running else "ended"
    problems.append(f"no new steps in {RECOVERS_WITHIN_S:.0f} s, the daemon {state}: {node.last_log_line()}")
    if not node.is_running:
        _restart(node)
    return False


def _restart(node: SwarmNode) -> None:
    node.start()
    node.wait_for(node.is_ready, timeout_s=START_S)


def _stop(node: SwarmNode) -> str:
    """Stop a node in order and return the problem, or ""."""
    if not node.is_running:
        return f"the node had ended: {node.last_log_line()}"
    try:
        code = node.stop()
    except subprocess.TimeoutExpired:
        node.close()
        return f"the node did not end in {STOP_S:.0f} s after SIGTERM"
    return f"exit code {code} at the end: {node.last_log_line()}" if code else ""


def _ends(node: SwarmNode) -> bool:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while node.is_running and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return not node.is_running


def _check_refusal(context: FaultContext) -> list[str]:
    """Start the node, which must end with the exit code and the text that the fault expects."""
    node, refusal = context.node, context.refusal
    assert refusal is not None
    if node.is_running:
        return ["the node runs and should have been stopped"]
    node.start()
    try:
        code = node.process.wait(timeout_s=START_S)
    except subprocess.TimeoutExpired:
        node.stop()
        return [f"the node did not refuse to start ({refusal.text!r} was expected)"]
    if code != refusal.exit_code or refusal.text not in node.last_log_line():
        return [f"exit code {code}, {node.last_log_line()!r}; {refusal.exit_code}, {refusal.text!r} were expected"]
    return []
