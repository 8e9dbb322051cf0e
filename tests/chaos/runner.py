"""One fault after another, on all nodes side by side: do harm, let the node recover, look, and have it judged.

    schedule --faults of node a--> thread: harm, recovery, look, judge --\
             --faults of node b--> thread: the same                     --+--> outcomes, as they come
             --faults of node c--> thread: the same                     --/

So a node's neighbors have troubles of their own while it recovers, as in life.
"""

from __future__ import annotations

import queue
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.faults.base import Ends
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import Violation
from tests.chaos.machine import Busy, Meter
from tests.chaos.scene import Scene
from tests.chaos.swarm import LOOK_S, START_S, STOP_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.chaos.faults.base import Fault
    from tests.chaos.observing.evidence import Evidence
    from tests.chaos.observing.observe import Observation
    from tests.chaos.schedule import Planned
    from tests.chaos.swarm import Swarm, SwarmNode

DIES_WITHIN_S = 60.0
NEW_STEPS = 2  # the first may have been done before the fault, and told after it


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one fault. `recovered_s`: from its end to two new steps; None where there was none in time.

    `busy`: how busy the machine was from the fault's beginning until it was judged.
    """

    planned: Planned
    fault: Fault
    notes: tuple[str, ...]
    harm_s: float
    recovered_s: float | None
    violations: tuple[Violation, ...]
    busy: Busy


class Runner:
    """Plays planned faults on a swarm. What violates something is written down in `evidence` at once, where given."""

    def __init__(self, swarm: Swarm, faults: Mapping[str, Fault], evidence: Evidence | None = None) -> None:
        self._swarm, self._faults, self._evidence = swarm, faults, evidence
        self._seen = self._look()

    def play_all(self, lanes: Mapping[str, Iterable[Planned]], *, stop_after_s: float) -> Iterator[Outcome]:
        """Plays each node's faults one after another, all nodes side by side; no new one after so long.

        Outcomes come as they are judged. What a fault does not foresee is raised here, and then no new one is begun.
        """
        stop_at, told = time.monotonic() + stop_after_s, queue.SimpleQueue[Outcome | BaseException | None]()
        is_over = threading.Event()

        def play(planned_faults: Iterable[Planned]) -> None:
            try:
                for planned in planned_faults:
                    if is_over.is_set() or time.monotonic() > stop_at:
                        break
                    told.put(self.play(planned))
            except BaseException as error:
                told.put(error)  # raised by whoever takes it, if anybody still does
            else:
                told.put(None)

        for name, planned_faults in lanes.items():
            threading.Thread(target=play, args=(planned_faults,), name=f"faults-{name}", daemon=True).start()
        num_playing = len(lanes)
        try:
            while num_playing:
                outcome = told.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    num_playing -= 1
                else:
                    yield outcome
        finally:
            is_over.set()

    def play(self, planned: Planned) -> Outcome:
        """Does one fault and waits until its node is well again, or too long."""
        fault, node = self._faults[planned.fault], self._swarm.node(planned.node)
        scene = Scene(self._swarm, node, random.Random(planned.dice))
        meter, problems = Meter(), list[str]()
        self._note("begins", planned)
        if not node.is_running:
            problems.append(f"it had ended before: {node.last_words()}")
            node.start()
            node.wait_for(node.is_well, timeout_s=START_S)
        problems += self._do_harm(fault, scene)
        harmed_at = time.monotonic()
        self._note("is done", planned, scene.notes)
        recovered = self._recovers(node, fault, problems)
        recovered_s = time.monotonic() - harmed_at if recovered else None
        violations = self._judge(planned, problems, meter)
        harm_s = harmed_at - meter.began_at
        return Outcome(planned, fault, tuple(scene.notes), harm_s, recovered_s, violations, meter.read())

    def _judge(self, planned: Planned, problems: Iterable[str], meter: Meter) -> tuple[Violation, ...]:
        """Looks at the node; what was promised and not kept, and what holds no more."""
        fault, node = self._faults[planned.fault], self._swarm.node(planned.node)
        violations = [Violation("promise", node.name, fault.name, problem) for problem in problems]
        before, seen = self._seen[node.name], invariants.snapshot(node)
        self._seen[node.name] = seen
        violations += invariants.check(before, seen, fault)
        if self._evidence is not None:
            self._evidence.note("is judged", planned, busy=meter.read())
            self._evidence.look(node, violations, seen=(before, seen), busy=meter.read())
        return tuple(violations)

    def end(self) -> list[Violation]:
        """Stops every node in order, and has the whole run judged."""
        problems = {node.name: _stopped(node) for node in self._swarm.nodes}
        found = [Violation("promise", name, "", problem) for name, problem in problems.items() if problem]
        found += invariants.check_end(self._swarm)
        for node in (*self._swarm.nodes, self._swarm.meeting_point) if self._evidence is not None else ():
            of_it = [violation for violation in found if violation.node in (node.name, invariants.ALL_NODES)]
            last = invariants.last_seen(node)
            self._evidence.look(node, of_it, seen=(last,) if last else ())
        return found

    def _note(self, what: str, planned: Planned, notes: Sequence[str] = ()) -> None:
        if self._evidence is not None:
            self._evidence.note(what, planned, notes=notes)

    def _look(self) -> dict[str, Observation]:
        """All nodes side by side: a look is mostly waiting."""
        nodes = self._swarm.nodes
        with ThreadPoolExecutor(len(nodes)) as threads:
            seen = threads.map(invariants.snapshot, nodes)
            return {node.name: one for node, one in zip(nodes, seen, strict=True)}

    def _do_harm(self, fault: Fault, scene: Scene) -> list[str]:
        """Injects the fault and starts the node again where it is to be; says what went otherwise than promised."""
        node, first_pid, problems = scene.node, scene.node.pid, list[str]()
        try:
            fault.inject(scene)
        except Exception as error:  # whatever a fault cannot do or did not see is a finding, and the run goes on
            problems.append(f"{type(error).__name__}: {error}")
        if scene.refusal is not None:
            problems += _refuses(scene)
        elif fault.ends is Ends.GOES_ON and not (node.is_running and node.pid == first_pid):
            problems.append(f"the daemon ended: {node.last_words()}")
        elif fault.ends is Ends.RESTARTS and node.pid == first_pid and not _ends(node):
            problems.append(f"the daemon did not end in {DIES_WITHIN_S:.0f} s")
        elif (
            fault.ends is Ends.REFUSES and node.is_running
        ):  # the harm was not done; what heals it is for a stopped node
            node.stop(signal.SIGKILL)
        scene.heal()
        if not node.is_running:
            node.start()
        return problems

    def _recovers(self, node: SwarmNode, fault: Fault, problems: list[str]) -> bool:
        """Waits for workers that are ready and for steps that were begun after the fault."""
        first: int | None = None

        def works() -> bool:
            nonlocal first
            done = node.work()
            if first is None:
                first = done
            return done is not None and first is not None and done >= first + NEW_STEPS and node.is_well()

        if node.wait_for(works, timeout_s=fault.recovers_within_s):
            return True
        state = "stands" if node.is_running else "ended"
        problems.append(f"no new steps in {fault.recovers_within_s:.0f} s, the daemon {state}: {node.last_words()}")
        if not node.is_running:
            node.start()
            node.wait_for(node.is_well, timeout_s=START_S)
        return False


def _stopped(node: SwarmNode) -> str:
    """Stops a node in order; what was wrong with that, "" where nothing."""
    if not node.is_running:
        return f"it had ended: {node.last_words()}"
    try:
        code = node.stop()
    except subprocess.TimeoutExpired:
        node.close()
        return f"it did not end in {STOP_S:.0f} s after SIGTERM"
    return f"exit code {code} at the end: {node.last_words()}" if code else ""


def _ends(node: SwarmNode) -> bool:
    deadline = time.monotonic() + DIES_WITHIN_S
    while node.is_running and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return not node.is_running


def _refuses(scene: Scene) -> list[str]:
    """Starts the node, which must end by itself with the code and the words that the fault expects."""
    node, refusal = scene.node, scene.refusal
    assert refusal is not None
    if node.is_running:
        return ["it runs where it should have been stopped"]
    node.start()
    try:
        code = node.process.wait(timeout_s=START_S)
    except subprocess.TimeoutExpired:
        node.stop()
        return [f"it did not refuse to start ({refusal.words!r} was expected)"]
    if code != refusal.exit_code or refusal.words not in node.last_words():
        return [f"exit code {code}, {node.last_words()!r}; {refusal.exit_code}, {refusal.words!r} were expected"]
    return []
