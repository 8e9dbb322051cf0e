"""`join --run RUN_ID`: the manifest of a run by its id, from the swarm's directory."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.manifest import parse_canonical
from ftis_node.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings

TIMEOUT_S = 60.0
RUN_ID = re.compile(r"[0-9a-f]{32}")


def is_run_id(run: str) -> bool:
    """Return whether `run` is a run id. It can also be the name of a preset or a file."""
    return RUN_ID.fullmatch(run) is not None


def find_run(run_id: str, settings: NodeSettings) -> RunManifest:
    """Ask the given peers for the manifest of a run.

    Raise UsageError without peers, and NetworkError if no peer has it. Raise ConfigError if this version does not
    understand the manifest, or if the parsed manifest has another run id. The id is a hash of the text, so a text that
    is not in canonical form has another id.
    """
    from ftis_node.gossip.directory.lookup import find_manifest
    from ftis_node.gossip.settings import NetworkSettings

    if not settings.peers:
        raise UsageError("a run is found by its id through a peer: give --peers, or --run with a preset or a file")
    folder = Path(tempfile.mkdtemp(prefix="ftis-look-"))
    network = NetworkSettings(sockets_dir=folder, listen=settings.listen, peers=settings.peers)
    try:
        canonical = asyncio.run(find_manifest(network, run_id=run_id, timeout_s=TIMEOUT_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    manifest = parse_canonical(canonical, source=f"run {run_id}")
    if manifest.run_id != run_id:
        raise ConfigError(
            f"the manifest of run {run_id} is not in the canonical form: here its id is {manifest.run_id}; "
            "ask for its TOML file, and give --run FILE"
        )
    return manifest
