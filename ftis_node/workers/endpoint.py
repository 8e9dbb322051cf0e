"""The path of a worker's socket: a file in a folder that the caller gives.

The kernel limits the path of a unix socket to 107 bytes. For a longer one zmq's error does not name the folder, so this
module checks the length.
"""

from __future__ import annotations

import os
from pathlib import Path

from ftis_node.errors import ConfigError

SCHEME = "ipc://"
MAX_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes, including the terminating zero


def endpoint_in(sockets_dir: Path, *, name: str) -> str:
    """Return a zmq endpoint in `sockets_dir`, and create that folder if missing. Raises ConfigError for a path that is
    too long.
    """
    path = Path(sockets_dir).absolute() / f"{name}.sock"
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} is {num_bytes} bytes long, the system's limit is {MAX_SOCKET_PATH_BYTES}: "
            "choose a home with a shorter path"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"{SCHEME}{path}"


def remove_socket(endpoint: str) -> None:
    """Remove an endpoint's socket file, which zmq does not remove."""
    Path(endpoint.removeprefix(SCHEME)).unlink(missing_ok=True)
