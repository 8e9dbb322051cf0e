"""A slow line between two network namespaces: a TUN device at either end, and this process between them.

The kernels we test on have no netem. What goes in at one end comes out at the other after `delay_s`, or, with
probability `loss`, never. It is a program of its own (standard library only), so that a busy test does not slow it:

    python slow_link.py NAMESPACE DEVICE NAMESPACE DEVICE DELAY_S LOSS PARENT_PID

It prints a line when both devices are there, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
MAX_PACKET_BYTES = 1 << 16
MAX_WAITING = 1 << 15  # packets on the line in one direction; what comes on top is lost, as on a real one
LIBC = ctypes.CDLL(None, use_errno=True)


def open_tun(namespace: str, device: str) -> int:
    """A new TUN device in a namespace; it lives as long as the descriptor."""
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if LIBC.setns(place, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(place)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def carry(ends: tuple[int, int], *, delay_s: float, loss: float, rng: random.Random) -> None:
    """Carries packets both ways for ever."""
    lines: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by the end where they come out
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        due = [line[0][0] for line in lines.values() if line]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, (), (), wait_s)[0]:
            packet = os.read(end, MAX_PACKET_BYTES)
            line = lines[others[end]]
            if rng.random() >= loss and len(line) < MAX_WAITING:
                line.append((time.monotonic() + delay_s, packet))
        for end, line in lines.items():
            while line and line[0][0] <= time.monotonic():
                try:
                    os.write(end, line.popleft()[1])
                except OSError:  # the device is down just now: the packet is lost
                    continue


def main(arguments: list[str]) -> None:
    near, near_device, far, far_device, delay_s, loss, parent = arguments
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    ends = (open_tun(near, near_device), open_tun(far, far_device))
    os.write(1, b"ready\n")
    carry(ends, delay_s=float(delay_s), loss=float(loss), rng=random.Random(0))


if __name__ == "__main__":
    main(sys.argv[1:])
