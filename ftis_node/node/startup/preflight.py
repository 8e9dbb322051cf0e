"""Fast checks at the start, before the node imports torch, starts a worker or writes a file.

Each takes less than a second. Its error is one line that says what to do. The state may change after a check, so the
code that opens the port or writes the file raises errors too. Users rarely see those.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import free_bytes
from ftis_node.config.home_files import HOME_SCHEMA, last_settings, marked_schema
from ftis_node.errors import ConfigError, FileError, MachineError, UsageError
from ftis_node.files import read_object
from ftis_node.gossip.p2pd.process import check_free
from ftis_node.learner.checkpoint.checkpoint_files import CHECKPOINT_PREFIX
from ftis_node.memory.choice import checkpoint_owner
from ftis_node.models import model_fingerprint, resolve_model
from ftis_node.models.fingerprint import other_model
from ftis_node.node.storage.disk_space import checkpoint_bytes, checkpoint_step
from ftis_node.workers.durable import newest_complete

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings
    from ftis_node.gossip.multiaddr import ListenAddress
    from ftis_node.models import ModelSource

STATUS_HOST = "127.0.0.1"
RESERVE_BYTES = 32 << 20  # for the groups, events and logs of the first minutes


def check_ports(listen: Iterable[ListenAddress], status_port: int) -> None:
    """Raise UsageError for the first port of this node that another process uses."""
    check_free(listen)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            probe.bind((STATUS_HOST, status_port))
    except OSError as error:
        raise UsageError(
            f"the status port {status_port} cannot be opened ({error.strerror}): choose another with --status-port"
        ) from None


def check_owner(home: Home, source: ModelSource, *, lora: bool | None) -> None:
    """Raise ConfigError if the home's newest checkpoint is of another model, or disagrees with `lora`.

    If `lora` is None, full weights and an adapter both pass. The learner handles a checkpoint that cannot be read.
    """
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    owner = {} if newest is None else checkpoint_owner(newest / "state.json")
    if not owner:
        return
    if owner.get("model_fingerprint") != model_fingerprint(source):
        raise ConfigError(other_model(home.root, owner.get("model"), source.name))
    trained_lora = owner.get("trains") != "full"
    if lora is not None and trained_lora != lora:
        begun, now = ("--lora", "--full") if trained_lora else ("--full", "--lora")
        raise ConfigError(f"{home.root} was started with {begun}, not {now}: give {begun}, or another --home")


def trained_runs(home: Home) -> list[str]:
    """Return the run id that each of the home's checkpoints names, newest first.

    A home has one run, so different ids mean a damaged checkpoint. Return an empty list for a home of an older schema,
    because run ids were different then.
    """
    if marked_schema(home) != HOME_SCHEMA:
        return []
    states = sorted(home.checkpoints.glob(f"{CHECKPOINT_PREFIX}*/state.json"), reverse=True)
    run_ids = [checkpoint_owner(state).get("run_id") for state in states]
    return [run_id for run_id in run_ids if isinstance(run_id, str)]


def known_runs(home: Home) -> list[str]:
    """Return `trained_runs`, or the run id in the last status if the home has no checkpoint, as a generator's home.

    Return an empty list if the status cannot be read either.
    """
    if trained := trained_runs(home):
        return trained
    try:
        run_id = read_object(home.status)["run"]["id"]
    except (OSError, FileError, KeyError, TypeError):
        return []
    return [run_id] if isinstance(run_id, str) and run_id and marked_schema(home) == HOME_SCHEMA else []


def check_finished(home: Home, settings: NodeSettings) -> None:
    """Raise ConfigError if the settings differ from the last start in the model, or in full weights versus LoRA.

    A start of a finished home ends before `prepare` calls `check_owner`. Settings that match the last start are not
    checked, because resolving a model may query the Hugging Face hub. Raise ModelError for a model that is not found.
    """
    last = last_settings(home)
    if settings.model != last.get("model") or settings.lora not in (None, last.get("lora")):
        check_owner(home, resolve_model(settings.model), lora=settings.lora)


def check_disk_space(home: Home, source: ModelSource, settings: NodeSettings) -> None:
    """Raise MachineError if the home's disk has no space for one more checkpoint."""
    needed, free = RESERVE_BYTES, free_bytes(home.root)
    if settings.learns:
        needed += checkpoint_bytes(source, settings)
    if free < needed:
        raise MachineError(
            f"the disk is too full: {free / 1e6:.0f} MB are free at {home.root}, {needed / 1e6:.0f} MB are needed: "
            "free disk space, or give another --home"
        )


def check_saved(home: Home, source: ModelSource, settings: NodeSettings, *, step: int) -> None:
    """Raise MachineError at a node's end if a full disk kept its last steps from being saved."""
    saved = checkpoint_step(home)
    if saved < step and free_bytes(home.checkpoints) < checkpoint_bytes(source, settings):
        raise MachineError(
            f"the disk is full: no checkpoint after step {saved} of {step} could be written to {home.checkpoints}; "
            f"free disk space and start again; the node resumes after step {saved}"
        )
