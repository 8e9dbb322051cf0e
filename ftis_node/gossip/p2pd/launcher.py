"""Starts p2pd so that it dies with the daemon, also with one killed by SIGKILL.

Run as `python -I -S launcher.py PARENT_PID PROGRAM ARGUMENTS...`; it becomes PROGRAM. On Linux the kernel is asked to
send SIGKILL when the parent ends (`PR_SET_PDEATHSIG`, which survives exec). The request counts from now on only, so a
parent that ended before is looked for once. Elsewhere p2pd still ends when the daemon's control connection breaks.

It is a program of its own, not a `preexec_fn`: code between fork and exec in a process with threads may hang.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and becomes the program."""
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
