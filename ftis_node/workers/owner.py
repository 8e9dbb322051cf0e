"""Parent-death handling: a worker ends when its owner does, even if the owner is killed.

Two mechanisms run at once. The kernel's parent-death signal (Linux) is instant, but applies only to the direct parent.
A thread that watches the owner also works if a launcher such as torchrun is between the two. The thread ends the
process without clean-up: a worker writes its files atomically (`durable.py`), so a kill cannot corrupt them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
ORPHAN_EXIT_CODE = 1
POLL_EVERY_S = 0.5


def die_with_owner(owner_pid: int, *, poll_every_s: float = POLL_EVERY_S) -> None:
    """End this process when `owner_pid` ends. Call it once, before any long work."""
    parent_pid = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # the owner died before the signal was requested
        os._exit(ORPHAN_EXIT_CODE)
    watch = threading.Thread(target=_watch, args=(owner_pid, poll_every_s), name="owner-watch", daemon=True)
    watch.start()


def _watch(owner_pid: int, poll_every_s: float) -> None:
    if hasattr(os, "pidfd_open"):
        _wait_for_exit(owner_pid)
    else:
        _poll_parent(os.getppid(), poll_every_s)
    os._exit(ORPHAN_EXIT_CODE)


def _wait_for_exit(owner_pid: int) -> None:
    """Block until the owner has ended. A pidfd becomes readable at the exit, before the process is reaped."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()


def _poll_parent(parent_pid: int, poll_every_s: float) -> None:
    """Block until the parent of this process changes, on systems without pidfds."""
    while os.getppid() == parent_pid:
        time.sleep(poll_every_s)
