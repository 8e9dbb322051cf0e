"""Processes that die and processes that stand still: kill -9, and SIGSTOP for up to half a minute."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import psutil

from tests.chaos.faults.base import Ends, Fault, generates, trains

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.scene import Scene
    from tests.chaos.swarm import SwarmNode

SHORTEST_STOP_S, LONGEST_STOP_S = 3.0, 30.0
COMES_BACK_S = 120.0  # a process that was killed is a new one; a busy machine takes its time
SHOWN_BY = "tests/chaos/test_chaos.py::test_a_swarm_outlives_one_fault_of_each_sort"
KILLED_WORKER = "tests/node/test_stop.py::test_a_killed_worker_loses_no_group"
KILLED_DAEMON = "tests/node/test_stop.py::test_all_processes_end_with_a_killed_daemon_and_the_next_start_resumes"


def _process(scene: Scene, role: str) -> psutil.Process:
    """The victim's process of that role, waited for where it is just being started."""
    found = scene.node.wait_for(lambda: scene.node.roles().get(role), timeout_s=COMES_BACK_S)
    assert found, f"{scene.node.name} has no {role}: {scene.node.last_words()}"
    process: psutil.Process = scene.rng.choice(found)
    return process


def kill(scene: Scene, *, role: str) -> None:
    """kill -9. Of a daemon its end is waited for, of anything else the new one in its place."""
    process = _process(scene, role)
    scene.note(f"pid {process.pid}")
    with suppress(psutil.NoSuchProcess):  # it was just being replaced
        process.kill()
    if role == "daemon":
        scene.node.process.wait(timeout_s=COMES_BACK_S)
        return

    def is_replaced() -> bool:
        return any(other.pid != process.pid for other in scene.node.roles().get(role, []))

    assert scene.node.wait_for(is_replaced, timeout_s=COMES_BACK_S), f"no new {role} in {COMES_BACK_S:.0f} s"


def kill_all(scene: Scene) -> None:
    """kill -9 of the daemon and everything that it started, in any order."""
    family = [process for processes in scene.node.roles().values() for process in processes]
    scene.rng.shuffle(family)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    scene.node.process.wait(timeout_s=COMES_BACK_S)


def stop_and_continue(scene: Scene, *, role: str) -> None:
    """SIGSTOP, a while, SIGCONT: what a laptop's lid, a debugger or a machine that swaps does."""
    process, stopped_s = _process(scene, role), scene.rng.uniform(SHORTEST_STOP_S, LONGEST_STOP_S)
    scene.note(f"pid {process.pid} for {stopped_s:.0f} s")
    process.suspend()
    try:
        time.sleep(stopped_s)
    finally:
        with suppress(psutil.NoSuchProcess):  # its owner may have had enough of it
            process.resume()


def stop_all_and_continue(scene: Scene) -> None:
    """The whole node stands still, as on a machine that sleeps."""
    stopped_s = scene.rng.uniform(SHORTEST_STOP_S, LONGEST_STOP_S)
    family = scene.node.process.processes()
    scene.note(f"{len(family)} processes for {stopped_s:.0f} s")
    try:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(stopped_s)
    finally:
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):
                process.resume()


def terminate(scene: Scene) -> None:
    """SIGTERM, as a service manager's restart; the node must end in order by itself."""
    code = scene.node.stop(signal.SIGTERM)
    assert code == 0, f"exit code {code} after SIGTERM: {scene.node.last_words()}"


def kill_meeting_point(scene: Scene) -> None:
    """The bootstrap node dies and comes back under the same address."""
    meeting_point = scene.swarm.meeting_point
    with scene.swarm.at_the_meeting_point:
        os.kill(meeting_point.pid, signal.SIGKILL)
        meeting_point.process.wait(timeout_s=COMES_BACK_S)
        time.sleep(scene.rng.uniform(0, SHORTEST_STOP_S))
        meeting_point.start()
        meeting_point.process.first_line()


def has_engine_core(node: SwarmNode) -> bool:
    """Whether vLLM's core runs as a process of its own in this node."""
    return bool(node.roles().get("engine core"))


def _vllm_missing() -> str:
    return "" if find_spec("vllm") else "vLLM is not installed"


def _fault(
    name: str,
    promise: str,
    inject: Callable[[Scene], None],
    shown_by: str = SHOWN_BY,
    fits: Callable[[SwarmNode], bool] = lambda _: True,
) -> Fault:
    return Fault(name=name, kind="processes", promise=promise, shown_by=shown_by, inject=inject, fits=fits)


RESUMES = "It resumes at its newest step with every group that it had acknowledged."
FAULTS = (
    Fault("kill-daemon", "processes", f"Everything it started ends with it. {RESUMES}", KILLED_DAEMON,
          partial(kill, role="daemon"), Ends.RESTARTS),
    Fault("kill-everything", "processes", RESUMES, SHOWN_BY, kill_all, Ends.RESTARTS),
    Fault("restart", "processes", "It ends in order within ten seconds, exit code 0, and goes on where it was.",
          "tests/node/test_stop.py::test_sigterm_at_any_moment_ends_the_node_in_order", terminate, Ends.RESTARTS),
    _fault("kill-generator", "A new worker makes what was being made again; no running number is lost.",
           partial(kill, role="generation worker"), KILLED_WORKER, fits=generates),
    _fault("kill-learner", "A new worker loads the newest checkpoint; the step's groups are trained on, once.",
           partial(kill, role="learner worker"), KILLED_WORKER, fits=trains),
    _fault("kill-network", "p2pd is started again under the same peer id, and the peers are dialed.",
           partial(kill, role="p2pd")),
    Fault("kill-engine-core", "processes", "The generation worker notices and is started again.", SHOWN_BY,
          partial(kill, role="engine core"), missing=_vllm_missing, fits=has_engine_core),
    _fault("stop-daemon", "After up to 30 s it goes on as if nothing had been, with the same workers.",
           partial(stop_and_continue, role="daemon")),
    _fault("stop-generator", "It goes on, or is found hung and started again; the learner trains meanwhile.",
           partial(stop_and_continue, role="generation worker"), fits=generates),
    _fault("stop-learner", "It goes on, or is found hung and started again from the newest checkpoint.",
           partial(stop_and_continue, role="learner worker"), fits=trains),
    _fault("stop-network", "p2pd goes on, or is found hung and started again; own groups are trained on meanwhile.",
           partial(stop_and_continue, role="p2pd")),
    Fault("stop-engine-core", "processes", "It goes on, or is found hung and started again.", SHOWN_BY,
          partial(stop_and_continue, role="engine core"), missing=_vllm_missing, fits=has_engine_core),
    _fault("stop-everything", "A machine that slept wakes up: the node finds its peers again.",
           stop_all_and_continue),
    _fault("kill-meeting-point", "Members that know each other need no meeting point; it comes back under its address.",
           kill_meeting_point),
)  # fmt: skip
