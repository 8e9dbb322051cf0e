"""Faults of processes: kill -9, SIGTERM, SIGSTOP for up to half a minute, of a whole node longer; and pauses."""

import os
import signal
import time
from contextlib import suppress
from functools import partial

import psutil

from ftis_node.config.home import Home
from ftis_node.node.http_api.node_client import post_document
from tests.chaos.faults.base import Ends, Fault, FaultContext, generates, trains
from tests.chaos.swarm import SwarmNode

SHORTEST_STOP_S, LONGEST_STOP_S = 3.0, 30.0
LONGEST_SLEEP_S, BACK_WITHIN_S = 90.0, 60.0
PAUSED_WITHIN_S = 120.0  # the step in progress ends first
REPLACED_WITHIN_S = 300.0  # a busy machine starts a new process slowly


def _process(context: FaultContext, role: str) -> psutil.Process:
    """Wait for a process of this role in the node and return it."""
    found = context.node.wait_for(lambda: context.node.roles().get(role), timeout_s=REPLACED_WITHIN_S)
    assert found, f"{context.node.name} has no {role}: {context.node.last_log_line()}"
    process: psutil.Process = context.rng.choice(found)
    return process


def kill(context: FaultContext, *, role: str) -> None:
    """Kill a process, and wait for the end of a daemon or for the replacement of any other process."""
    process = _process(context, role)
    context.notes.append(f"pid {process.pid}")
    with suppress(psutil.NoSuchProcess):  # the process ended by itself
        process.kill()
    if role == "daemon":
        context.node.process.wait(timeout_s=REPLACED_WITHIN_S)
        return

    def is_replaced() -> bool:
        return any(other.pid != process.pid for other in context.node.roles().get(role, []))

    assert context.node.wait_for(is_replaced, timeout_s=REPLACED_WITHIN_S), (
        f"no new {role} in {REPLACED_WITHIN_S:.0f} s"
    )


def kill_all(context: FaultContext) -> None:
    """Kill the daemon and all its descendants in random order."""
    family = [process for processes in context.node.roles().values() for process in processes]
    context.rng.shuffle(family)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    context.node.process.wait(timeout_s=REPLACED_WITHIN_S)


def stop_and_continue(context: FaultContext, *, role: str) -> None:
    """Stop a process for a while, as a debugger or a swapping machine does."""
    process, stopped_s = _process(context, role), context.rng.uniform(SHORTEST_STOP_S, LONGEST_STOP_S)
    context.notes.append(f"pid {process.pid} for {stopped_s:.0f} s")
    process.suspend()
    try:
        time.sleep(stopped_s)
    finally:
        with suppress(psutil.NoSuchProcess):  # the supervisor may have killed it as hung
            process.resume()


def stop_all_and_continue(context: FaultContext) -> None:
    """Stop the whole node for a while, as a sleeping machine does. Afterwards it must find its peers soon."""
    stopped_s = context.rng.uniform(SHORTEST_STOP_S, LONGEST_SLEEP_S)
    family = context.node.process.processes()
    context.notes.append(f"{len(family)} processes for {stopped_s:.0f} s")
    try:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(stopped_s)
    finally:
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    waited_s, last = 0.0, time.monotonic()
    while not context.node.wait_for(lambda: context.node.status("swarm", "peers_connected"), timeout_s=1.0):
        assert context.node.is_running, f"it ended: {context.node.last_log_line()}"
        now = time.monotonic()
        if any(not _sleeps(other) for other in context.swarm.neighbors(context.node)):  # else nobody can be found
            waited_s += now - last
        last = now
        assert waited_s < BACK_WITHIN_S, f"no peer {BACK_WITHIN_S:.0f} s after the sleep"
    context.notes.append(f"a peer again after {waited_s:.0f} s")


def _sleeps(node: SwarmNode) -> bool:
    """Return whether another fault has stopped the node's daemon."""
    try:
        return psutil.Process(node.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def pause(context: FaultContext) -> None:
    """Pause the node for a while. Its workers must end; then it must serve groups to a peer that asks for them."""
    home, before = Home(context.node.home), _worker_bytes(context.node)
    post_document(home, "/pause", {"for_s": 3600})
    is_paused = context.node.wait_for(lambda: context.node.status("pause", "in_effect"), timeout_s=PAUSED_WITHIN_S)
    assert is_paused, f"not paused within {PAUSED_WITHIN_S:.0f} s"
    sent, paused_s = _sent_bytes(context), context.rng.uniform(SHORTEST_STOP_S, LONGEST_STOP_S)
    time.sleep(paused_s)
    after, served = _worker_bytes(context.node), _sent_bytes(context) - sent
    context.notes.append(
        f"{paused_s:.0f} s; workers {before >> 20} MiB -> {after >> 20} MiB; {served} bytes served meanwhile"
    )
    post_document(home, "/resume", {})
    assert not after, "a paused node has a worker"


def _sent_bytes(context: FaultContext) -> int:
    return context.node.status("swarm", "bytes_out") or 0


def _worker_bytes(node: SwarmNode) -> int:
    """Return the resident memory of the node's worker processes."""
    roles = node.roles()
    workers = [process for role in ("generation worker", "learner worker") for process in roles.get(role, ())]
    return sum(process.memory_info().rss for process in workers)


def terminate(context: FaultContext) -> None:
    """Send SIGTERM as a service manager does. The node must end in order."""
    code = context.node.stop(signal.SIGTERM)
    assert code == 0, f"exit code {code} after SIGTERM: {context.node.last_log_line()}"


def kill_bootstrap(context: FaultContext) -> None:
    """Kill the bootstrap node and start it again at the same address."""
    bootstrap = context.swarm.bootstrap
    with context.swarm.bootstrap_lock:
        os.kill(bootstrap.pid, signal.SIGKILL)
        bootstrap.process.wait(timeout_s=REPLACED_WITHIN_S)
        time.sleep(context.rng.uniform(0, SHORTEST_STOP_S))
        bootstrap.start()
        bootstrap.process.first_line()


def has_engine_core(node: SwarmNode) -> bool:
    """Return whether vLLM's engine core is a separate process of this node."""
    return bool(node.roles().get("engine core"))


RESUMES = "It resumes at its newest step with every acknowledged group."
_fault = partial(Fault, "processes")
FAULTS = (
    _fault("kill-daemon", f"Its workers end too. {RESUMES}", partial(kill, role="daemon"), Ends.RESTARTS),
    _fault("kill-everything", RESUMES, kill_all, Ends.RESTARTS),
    _fault("restart", "It ends in order within ten seconds with exit code 0, and resumes where it was.", terminate,
           Ends.RESTARTS),
    _fault("kill-generator", "A new worker samples the unfinished groups again. No sequence number is lost.",
           partial(kill, role="generation worker"), fits=generates),
    _fault("kill-learner", "A new worker loads the newest checkpoint. The step's groups are trained on once.",
           partial(kill, role="learner worker"), fits=trains),
    _fault("kill-network", "p2pd restarts with the same peer id, and the peers are dialed.",
           partial(kill, role="p2pd")),
    _fault("kill-engine-core", "The generation worker notices it and restarts.", partial(kill, role="engine core"),
           fits=has_engine_core),
    _fault("stop-daemon", "It continues with the same workers.", partial(stop_and_continue, role="daemon")),
    _fault("stop-generator", "It continues, or restarts as hung. The learner trains meanwhile.",
           partial(stop_and_continue, role="generation worker"), fits=generates),
    _fault("stop-learner", "It continues, or restarts as hung from the newest checkpoint.",
           partial(stop_and_continue, role="learner worker"), fits=trains),
    _fault("stop-network", "p2pd continues, or restarts as hung. The learner trains on own groups meanwhile.",
           partial(stop_and_continue, role="p2pd")),
    _fault("stop-engine-core", "It continues, or restarts as hung.", partial(stop_and_continue, role="engine core"),
           fits=has_engine_core),
    _fault("stop-everything", "The node finds its peers again, as after the sleep of a machine.",
           stop_all_and_continue),
    _fault("pause", "Its workers end and free their memory. It serves groups, and goes on with the saved weights.",
           pause),
    _fault("kill-bootstrap", "Members that know each other need no bootstrap node. It restarts at its address.",
           kill_bootstrap),
)  # fmt: skip
