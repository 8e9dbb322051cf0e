"""Limits for many identities at one network address (Sybil attack): in directory buckets, and among peers to dial.

An identity costs nothing, but an address does. If space runs out, the address block with the most entries loses its
newest entries first, so earlier members stay. A member that claims foreign addresses gains little, because peers cannot
dial it.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    Key = TypeVar("Key")

BLOCK_BITS = {4: 24, 6: 48}  # typical allocation of one household or small provider


def address_block(addresses: Iterable[str]) -> str:
    """Return the address block of a peer: that of its first public address, else of its first address.

    A peer behind a relay is in the relay's block.
    """
    blocks = [block for address in addresses if (block := _block(address))]
    return next((block for is_public, block in blocks if is_public), blocks[0][1] if blocks else "")


def choose_evicted(blocks: Mapping[Key, str], *, room: int) -> list[Key]:
    """Return the keys to drop so that `room` entries remain. `blocks` gives each entry's block, oldest first."""
    sizes = Counter(blocks.values())
    by_block: dict[str, list[Key]] = {}
    for key, block in blocks.items():
        by_block.setdefault(block, []).append(key)
    rank = {key: at for at, key in enumerate(blocks)}
    dropped: list[Key] = []
    while sum(sizes.values()) > room:
        largest = max(sizes.values())
        block = max(
            (block for block, size in sizes.items() if size == largest), key=lambda one: rank[by_block[one][-1]]
        )
        dropped.append(by_block[block].pop())
        sizes[block] -= 1
    return dropped


def sample_by_block(known: Mapping[str, Sequence[str]], *, per_block: int, rng: random.Random) -> list[str]:
    """Return dial candidates from peers and their addresses: at most `per_block` of each block, at random."""
    order = list(known)
    rng.shuffle(order)
    counts: Counter[str] = Counter()
    chosen = []
    for peer_id in order:
        block = address_block(known[peer_id])
        counts[block] += 1
        if counts[block] <= per_block:
            chosen.append(peer_id)
    return chosen


def _block(address: str) -> tuple[bool, str] | None:
    """Return whether an address is public, and its block; None if it starts with neither an IP address nor a name."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return True, host
    try:
        ip = ip_address(host)
        block = ip_network(f"{ip}/{BLOCK_BITS[ip.version]}", strict=False)
    except ValueError:  # not an IP address, or one with a zone
        return None
    return ip.is_global, str(block)
