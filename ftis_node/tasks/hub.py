"""Rows of a public data set, fetched by the library `datasets` in a child process.

The library imports pyarrow and other packages that a daemon does not need, and without a network it retries for
minutes. A child process frees that memory at its end and has a time limit. It first checks whether the hub answers; if
not, it reads only earlier downloads.

    python -m ftis_node.tasks.hub NAME CONFIG SPLIT LIMIT_S        rows as JSON lines on stdout
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

from ftis_node.errors import NetworkError

FETCH_LIMIT_S = 120.0
PROBE_LIMIT_S = 5.0


def fetch_rows(name: str, *, config: str, split: str, task: str, limit_s: float = FETCH_LIMIT_S) -> list[bytes]:
    """Return the rows of one split as JSON lines, from the hub or from an earlier download.

    Raises NetworkError, whose text explains how to give `task` a local file instead.
    """
    command = [sys.executable, "-m", __name__, name, config, split, str(limit_s)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if result.returncode == 0:
        return result.stdout.splitlines()
    reason = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if result.returncode == -signal.SIGALRM:
        reason = f"not done within {limit_s:g} s"
    raise NetworkError(f"{task}: cannot get {name} from the hub ({reason}): give a local file as {task}:PATH")


def go_offline_without_hub() -> None:
    """Make this process use only earlier downloads if the hub does not answer. Call it before importing `datasets`."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True  # `datasets` copies the value at its import


def _write_rows(name: str, config: str, split: str) -> None:
    go_offline_without_hub()
    from datasets import load_dataset

    for row in load_dataset(name, config, split=split):
        sys.stdout.write(json.dumps(row) + "\n")


def _answers(address: str) -> bool:
    """Return whether a server answers at the address."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_LIMIT_S).close()  # nosec B310: the hub's own address
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    # SIGALRM has no handler, so it ends this process wherever it hangs.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[4]))
    _write_rows(*sys.argv[1:4])
