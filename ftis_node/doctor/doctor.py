"""`doctor`: which checks there are, and how long each may take. Nothing is changed; no check imports torch but those of
engine, model and peers."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.doctor.engine import TORCH_LIMIT_S, VLLM_LIMIT_S, look_at_engines
from ftis_node.doctor.findings import Finding, worst_first
from ftis_node.doctor.limits import look_at_limits
from ftis_node.doctor.machine import look_at_disk, look_at_gpus, look_at_memory, look_at_python
from ftis_node.doctor.model import look_at_model
from ftis_node.doctor.network import examine_network, look_at_running, nat_kind
from ftis_node.doctor.runner import Check, run_checks
from ftis_node.doctor.sockets import (
    look_at_kernels_clock,
    look_at_peers,
    look_at_ports,
    look_at_routes,
    own_address,
)
from ftis_node.doctor.table import NETWORK_CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings
    from ftis_node.doctor.memory import MemoryQuestion

ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)  # to dial from: the node's own may be in use
QUICK_S = 10.0
MODEL_LIMIT_S = 30.0
DIALS_LIMIT_S = 30.0  # and as much again for each peer
GRACE_S = 5.0
NVIDIA_DEVICE = Path("/dev/nvidia0")
CHECKS = ("python", "gpu", "ram", "disk", "limits", "engine", "port", "route", "peer", "model")
NETWORK_FAILED, MACHINE_FAILED = 4, 3


@dataclass(frozen=True, slots=True)
class Patient:
    """What is to be looked at. `question`: the model and the run to plan for, None: no model was named.

    `settings`: those that `join` would read here.
    """

    home: Home
    listen: tuple[str, ...]
    status_port: int = 0
    peers: tuple[str, ...] = ()
    question: MemoryQuestion | None = None
    settings: NodeSettings | None = None


def examine(
    patient: Patient, *, only: Collection[str] = CHECKS, on_progress: Callable[[str], None] = lambda text: None
) -> list[Finding]:
    """All findings, the worst first. Raises nothing: what a check raises is a finding, too."""
    return worst_first(
        run_checks([check for check in checks_of(patient) if check.name in only], on_progress=on_progress)
    )


def checks_of(patient: Patient) -> list[Check]:
    """One for each of `CHECKS`."""
    url = patient.home.running_url()
    dials_s = DIALS_LIMIT_S * max(1, len(patient.peers))
    has_gpu = True if NVIDIA_DEVICE.exists() else None
    ports = partial(look_at_ports, patient.listen, patient.status_port, runs_here=url is not None)
    engines_s = TORCH_LIMIT_S + VLLM_LIMIT_S + GRACE_S
    return [
        Check("python", "Python", QUICK_S, look_at_python),
        Check("gpu", "the GPU's driver", QUICK_S, look_at_gpus),
        Check("ram", "memory", QUICK_S, look_at_memory),
        Check("disk", "the disk", QUICK_S, partial(look_at_disk, patient.home.root)),
        Check("limits", "the node's limits", QUICK_S, partial(look_at_limits, patient.home, patient.settings)),
        Check("engine", "importing torch and vLLM", engines_s, partial(look_at_engines, has_gpu=has_gpu)),
        Check("port", "ports", QUICK_S, ports),
        Check("route", "the network", QUICK_S, partial(_network, patient, url)),
        Check("peer", "the peers", dials_s + GRACE_S, partial(_peers, patient, dials_s)),
        Check("model", "the model", MODEL_LIMIT_S, partial(_model, patient.question)),
    ]


def exit_code_of(findings: list[Finding]) -> int:
    """3 where the machine cannot do it, 4 where only the network cannot, 0 otherwise."""
    failed = {finding.check for finding in findings if finding.level == "fail"}
    if failed - NETWORK_CHECKS:
        return MACHINE_FAILED
    return NETWORK_FAILED if failed else 0


def _network(patient: Patient, url: str | None) -> Iterator[Finding]:
    yield from look_at_routes()
    if url:
        yield from look_at_running(url)
    if not patient.peers:
        yield nat_kind(own_address(socket.AF_INET), own_address(socket.AF_INET6))
        yield from look_at_kernels_clock()


def _peers(patient: Patient, limit_s: float) -> Iterator[Finding]:
    if not patient.peers:
        advice = "give --peers ADDRESS as you would to join; without one a node works alone until others dial it"
        yield Finding("peer.none", "ok", "no peers were named, so none was dialled", advice)
        return
    yield from look_at_peers(patient.peers)
    yield from examine_network(patient.peers, listen=ANY_PORT, limit_s=limit_s)


def _model(question: MemoryQuestion | None) -> Iterator[Finding]:
    if question is not None:
        yield from look_at_model(question)
