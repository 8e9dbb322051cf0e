"""`doctor`: the list of checks, which run in parallel, each within its time limit.

A check is a function that yields results and changes nothing. It runs in a daemon thread, because a name server, a disk
or a driver may ignore time-outs. A check that exceeds its limit stays in its thread and ends with the process.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.doctor import engines, machine, network
from ftis_node.doctor.check_result import NETWORK_CHECKS, CheckResult
from ftis_node.doctor.model import MemoryQuestion, check_model
from ftis_node.errors import FtisError, MachineError, NetworkError

QUICK_S = 10.0
MODEL_LIMIT_S = 30.0
DIALS_LIMIT_S = 30.0  # plus this for each peer
GRACE_S = 5.0
NVIDIA_DEVICE = Path("/dev/nvidia0")
QUIET_S = 2.0  # seconds until progress names the open checks
POLL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check. `run` may take `limit_s`. `title` is the text shown while it runs."""

    name: str
    title: str
    limit_s: float
    run: Callable[[], Iterable[CheckResult]]


def run_checks(
    checks: Sequence[DoctorCheck], *, on_progress: Callable[[str], None] = lambda text: None
) -> list[CheckResult]:
    """Return the results of all checks, in the order of the checks; an exception in a check becomes a result.

    `on_progress` gets the open checks' titles.
    """
    answers: queue.SimpleQueue[tuple[str, list[CheckResult]]] = queue.SimpleQueue()
    began_at = time.monotonic()
    open_checks = {check.name: check for check in checks}
    found: dict[str, list[CheckResult]] = {}
    for check in checks:
        threading.Thread(target=_run, args=(check, answers), name=f"check-{check.name}", daemon=True).start()
    last_text = ""
    while open_checks:
        with suppress(queue.Empty):
            name, findings = answers.get(timeout=POLL_EVERY_S)
            if open_checks.pop(name, None):
                found[name] = findings
        elapsed_s = time.monotonic() - began_at
        for check in [check for check in open_checks.values() if check.limit_s <= elapsed_s]:
            del open_checks[check.name]
            text = f"{check.title}: no answer within {check.limit_s:g} s, stopped"
            found[check.name] = [CheckResult("check.cut", "warn", text, "run doctor again")]
        text = f"still checking: {', '.join(check.title for check in open_checks.values())}"
        if open_checks and elapsed_s >= QUIET_S and text != last_text:
            last_text = text
            on_progress(text)
    return [finding for check in checks for finding in found[check.name]]


def _run(check: DoctorCheck, answers: queue.SimpleQueue[tuple[str, list[CheckResult]]]) -> None:
    findings: list[CheckResult] = []
    try:
        for finding in check.run():
            findings.append(finding)  # noqa: PERF402 - what was found before a fault counts
    except FtisError as error:
        findings.append(
            CheckResult("peer.dial" if isinstance(error, NetworkError) else "check.broken", "fail", str(error))
        )
    except Exception as error:
        advice = "report it with what `ftis-node --debug doctor` says"
        findings.append(CheckResult("check.broken", "warn", f"{check.title}: {type(error).__name__}: {error}", advice))
    answers.put((check.name, findings))


def checks_of(home: Home, settings: NodeSettings, question: MemoryQuestion | None = None) -> list[DoctorCheck]:
    """Return the checks for a home and the settings that `join` would use. Without a `question` no model is checked.

    Their names are the values of `--only` (`cli/commands/doctor.py`).
    """
    url, peers = home.running_url(), settings.peers
    dials_s = DIALS_LIMIT_S * max(1, len(peers))
    ports = partial(network.check_listen_ports, settings.listen, runs_here=url is not None)
    check_engines = partial(engines.check_engines, has_gpu=NVIDIA_DEVICE.exists())
    engines_s = engines.TORCH_LIMIT_S + engines.VLLM_LIMIT_S + GRACE_S
    return [
        DoctorCheck("python", "Python", QUICK_S, machine.check_python),
        DoctorCheck("gpu", "the GPU's driver", QUICK_S, machine.check_gpus),
        DoctorCheck("ram", "memory", QUICK_S, machine.check_memory),
        DoctorCheck("disk", "the disk", QUICK_S, partial(machine.check_disk, home.root)),
        DoctorCheck("limits", "the node's limits", QUICK_S, partial(machine.check_limits, home, settings)),
        DoctorCheck("engine", "importing torch and vLLM", engines_s, check_engines),
        DoctorCheck("grader", "the graders of tasks", engines_s, engines.check_graders),
        DoctorCheck("port", "ports", QUICK_S, ports),
        DoctorCheck("route", "the network", QUICK_S, partial(_network, peers)),
        DoctorCheck("peer", "the peers", dials_s + GRACE_S, partial(network.examine_network, peers, dials_s)),
        DoctorCheck("model", "the model", MODEL_LIMIT_S, partial(check_model, question) if question else tuple),
    ]


def exit_code_of(findings: list[CheckResult]) -> int:
    """Return 3 if the machine cannot run the node, 4 if only the network prevents it, else 0."""
    failed = {finding.check for finding in findings if finding.level == "fail"}
    if failed - NETWORK_CHECKS:
        return MachineError.exit_code
    return NetworkError.exit_code if failed else 0


def _network(peers: tuple[str, ...]) -> Iterator[CheckResult]:
    yield from network.check_routes()
    if not peers:
        yield network.nat_kind(network.own_address(socket.AF_INET), network.own_address(socket.AF_INET6))
        yield from network.check_kernels_clock()
