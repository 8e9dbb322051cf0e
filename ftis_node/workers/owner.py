"""A worker never outlives its owner, also when the owner is killed and can say nothing.

Two ways at once: the kernel's parent-death signal (Linux), which is instant but bound to the direct parent, and a
thread that watches the owner itself, which also works under a launcher such as torchrun that stands between the two.
The watch ends the process without clean-up: whatever a worker keeps is written by `durable.py`, which a kill cannot
leave half done.
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
    """From now on this process ends when `owner_pid` does. Call it once, before anything that takes long."""
    parent_pid = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # it died before the signal was asked for
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
    """Block until the owner has ended. A pidfd becomes readable at the exit, before anyone has reaped it."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()


def _poll_parent(parent_pid: int, poll_every_s: float) -> None:
    """Where there are no pidfds: block until someone else has become the parent."""
    while os.getppid() == parent_pid:
        time.sleep(poll_every_s)
