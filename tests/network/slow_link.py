"""A slow link between two network namespaces: a TUN device at each end, and this process between them.

Not every kernel has netem. A packet arrives at the other end after `delay_s`, or is lost with probability `loss`. The
link is a separate program with only the standard library, so a busy test does not slow it down:

    python slow_link.py NAMESPACE DEVICE NAMESPACE DEVICE DELAY_S LOSS PARENT_PID

It prints a line when both devices exist, and ends with its parent.
"""

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
MAX_WAITING = 1 << 15  # packets in one direction; more are lost, as on a real link
LIBC = ctypes.CDLL(None, use_errno=True)


def open_tun(namespace: str, device: str) -> int:
    """Create a TUN device in a namespace. It exists as long as the descriptor that is returned."""
    namespace_fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if LIBC.setns(namespace_fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(namespace_fd)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def forward(ends: tuple[int, int], *, delay_s: float, loss: float, rng: random.Random) -> None:
    """Forward packets in both directions until killed."""
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by the end where they arrive
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        due = [queue[0][0] for queue in queues.values() if queue]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, (), (), wait_s)[0]:
            packet = os.read(end, MAX_PACKET_BYTES)
            queue = queues[others[end]]
            if rng.random() >= loss and len(queue) < MAX_WAITING:
                queue.append((time.monotonic() + delay_s, packet))
        for end, queue in queues.items():
            while queue and queue[0][0] <= time.monotonic():
                try:
                    os.write(end, queue.popleft()[1])
                except OSError:  # the device is down, so the packet is lost
                    continue


def main(arguments: list[str]) -> None:
    near, near_device, far, far_device, delay_s, loss, parent = arguments
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    ends = (open_tun(near, near_device), open_tun(far, far_device))
    os.write(1, b"ready\n")
    forward(ends, delay_s=float(delay_s), loss=float(loss), rng=random.Random(0))


if __name__ == "__main__":
    main(sys.argv[1:])
