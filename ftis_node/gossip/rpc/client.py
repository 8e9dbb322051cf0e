"""Client side of a stream: sends one request and reads items until the end frame; sizes and times are bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.gossip.interface import Fetched, FetchOutcome
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.rpc.frames import Frame, ItemCollector, outcome_of, read_frame, write_frame
from ftis_node.gossip.wire_names import RpcService, protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.gossip.encryption import PayloadCipher
    from ftis_node.gossip.p2pd.client import P2pdClient


@dataclass(frozen=True, slots=True)
class Caller:
    """The local p2pd client, peer id and cipher used for requests."""

    client: P2pdClient
    peer_id: str
    cipher: PayloadCipher


async def pull_items(
    caller: Caller,
    peer_id: str,
    protocol: str,
    request: bytes,
    *,
    items: ItemCollector,
    idle_s: float,
    timeout_s: float,
) -> Fetched:
    """Send `request` to a peer and collect its items. Raises no exception for a peer's behavior."""
    ciphertext = caller.cipher.encrypt(request, "request", caller.peer_id, peer_id, protocol)

    def open_item(item: bytes) -> bytes:
        return caller.cipher.decrypt(item, "item", peer_id, caller.peer_id, protocol, ciphertext)

    try:
        async with (
            asyncio.timeout(timeout_s),
            caller.client.stream(peer_id, protocol, timeout_s=timeout_s) as (reader, writer),
        ):
            await write_frame(writer, Frame.REQUEST, ciphertext, idle_s=idle_s)
            return items.end(await _read_items(reader, open_item, items=items, idle_s=idle_s, cipher=caller.cipher))
    except P2pdError:
        return items.end(FetchOutcome.UNREACHABLE)
    except TimeoutError:
        return items.end(FetchOutcome.TIMED_OUT)
    except (OSError, EOFError):
        return items.end(FetchOutcome.BROKEN)
    except RecordError as error:
        return items.end(outcome_of(error))


async def serves(caller: Caller, peer_id: str, run_name: str, service: RpcService, *, timeout_s: float) -> bool | None:
    """Return whether a connected peer serves HELLO or BATCHES of a run; None if the answer leaves that open."""
    items = ItemCollector(max_items=1, max_item_bytes=0, max_bytes=0)
    hello = await pull_items(
        caller,
        peer_id,
        protocol(run_name, service),
        b"",
        items=items,
        idle_s=timeout_s,
        timeout_s=timeout_s,
    )
    if hello.outcome in (FetchOutcome.COMPLETE, FetchOutcome.BUSY):
        return True
    return False if hello.outcome is FetchOutcome.UNREACHABLE else None


async def _read_items(
    reader: asyncio.StreamReader,
    open_item: Callable[[bytes], bytes],
    *,
    items: ItemCollector,
    idle_s: float,
    cipher: PayloadCipher,
) -> FetchOutcome:
    while True:
        kind, item = await read_frame(reader, max_bytes=items.next_max_bytes + cipher.overhead_bytes, idle_s=idle_s)
        if kind is Frame.END:
            return FetchOutcome.COMPLETE
        if kind is Frame.BUSY:
            return FetchOutcome.BUSY
        if kind is not Frame.ITEM:
            raise RecordError("frame_kind", f"{kind.name} in an answer")
        items.add(open_item(item))
