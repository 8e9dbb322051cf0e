"""Many identities at one place take no more room than a few: in a bucket of the directory, and among those to dial.

An identity costs nothing, an address does. So where there is too little room, whoever has most entries at one address
block gives way first, and of these the newest: members that were there before stay. A member that claims addresses it
does not have gains little by it: it cannot be dialled.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    Key = TypeVar("Key")

BLOCK_BITS = {4: 24, 6: 48}  # what one household or one small provider gets


def address_block(addresses: Iterable[str]) -> str:
    """The address block of a peer with these multiaddrs: of its first public address, else of its first one.

    A peer behind a relay is in the relay's block.
    """
    blocks = [block for address in addresses if (block := _block(address))]
    return next((block for is_public, block in blocks if is_public), blocks[0][1] if blocks else "")


def choose_evicted(blocks: Mapping[Key, str], *, room: int) -> list[Key]:
    """Whom to drop so that `room` remain of entries with these blocks, given oldest first."""
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
    """Peers to choose from, given the addresses of each: at most `per_block` of one block, drawn at random."""
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
    """Whether an address is public, and its block; None where it is none of IP or name."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return True, host
    try:
        ip = ip_address(host)
        block = ip_network(f"{ip}/{BLOCK_BITS[ip.version]}", strict=False)
    except ValueError:  # no IP address, or one with a zone, of which there is no network
        return None
    return ip.is_global, str(block)
