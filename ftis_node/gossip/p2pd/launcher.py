"""Starts p2pd so that it ends with the daemon, even if SIGKILL ends the daemon.

Run as `python -I -S launcher.py PARENT_PID PROGRAM ARGUMENTS...`; it becomes PROGRAM. On Linux the kernel sends SIGKILL
when the parent ends (`PR_SET_PDEATHSIG`, which survives exec). The request does not cover a parent that ended before
it, so the launcher checks that once. On other systems p2pd ends when the daemon's control connection breaks.

This is a separate program instead of a `preexec_fn`, because Python code between fork and exec may hang in a process
with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid = int(sys.argv[1])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
