"""A recorder of all packets that leave a host: `python recorder.py FILE OWNER_PID` inside its namespace.

It writes a line for each new destination, such as `udp 11.0.2.2:53` or `tcp 11.0.2.2:4001`. It skips destinations on
the loopback interface. It writes `dns NAME` for each DNS query, also for one to a local resolver.

It prints `ready` when it records, and ends with its owner. It imports only the standard library, so it starts at once.
"""

import ctypes
import os
import signal
import socket
import sys

ETH_P_ALL, ETH_P_IP, ETH_P_IPV6 = 0x0003, 0x0800, 0x86DD
PACKET_OUTGOING = 4
PR_SET_PDEATHSIG = 1
TCP, UDP, ICMP, IGMP, HOP_BY_HOP, ICMP6 = 6, 17, 1, 2, 0, 58
NAMES = {TCP: "tcp", UDP: "udp"}
DNS = 53


def destinations(packet: bytes, *, protocol: int, is_loopback: bool) -> list[str]:
    """Return the lines for one IP packet."""
    if protocol == ETH_P_IP:
        kind, start, address = packet[9], (packet[0] & 15) * 4, socket.inet_ntop(socket.AF_INET, packet[16:20])
    else:
        kind, start, address = packet[6], 40, f"[{socket.inet_ntop(socket.AF_INET6, packet[24:40])}]"
    if kind in (ICMP, IGMP, ICMP6, HOP_BY_HOP):  # sent by the kernel: errors, multicast membership, neighbors
        return []
    if kind not in NAMES:
        return [] if is_loopback else [f"protocol-{kind} {address}"]
    port = int.from_bytes(packet[start + 2 : start + 4], "big")
    lines = [] if is_loopback else [f"{NAMES[kind]} {address}:{port}"]
    if port == DNS and kind == UDP:
        lines.append(f"dns {queried_name(packet[start + 8 :])}")
    return lines


def queried_name(message: bytes) -> str:
    """Return the first name that a DNS message queries."""
    labels, position = [], 12
    while message[position]:
        length = message[position]
        labels.append(message[position + 1 : position + 1 + length].decode("ascii", "replace"))
        position += 1 + length
    return ".".join(labels)


def main(path: str, owner: int) -> None:
    """Record until killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        return
    seen: set[str] = set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)) as listening:
        with open(path, "w", buffering=1) as file:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            while True:
                packet, (device, protocol, direction, *_) = listening.recvfrom(1 << 16)
                if direction != PACKET_OUTGOING or protocol not in (ETH_P_IP, ETH_P_IPV6):
                    continue
                for line in destinations(packet, protocol=protocol, is_loopback=device == "lo"):
                    if line not in seen:
                        seen.add(line)
                        file.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
