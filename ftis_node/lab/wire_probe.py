"""Measures bytes per token on the wire for groups of usual size: 12 completions of 300 tokens, between two real p2pd.

Completions of tiny models have a few tokens, so in the demo announcements and signatures outweigh the tokens. This
probe measures the same path (announcement, pull, confirmation) with groups of the size that large models generate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from ftis_node.errors import NetworkError
from ftis_node.gossip import Gossip
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.records.codec import hash_prompt
from ftis_node.records.envelope import announce_group, open_announcement, seal_group
from ftis_node.records.group import Completion, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity

NUM_COMPLETIONS = 12
COMPLETION_TOKENS = 300
VOCABULARY = 151_665  # Qwen2.5's
RUN_ID = "0" * 32
NUM_GROUPS = 64
PULL_BATCH = 16
TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
SETTLE_S = 2.0  # two gossipsub heartbeats: announcements are lost until the mesh is complete
Held = dict[bytes, tuple[bytes, bytes]]  # id: announcement, body


def loopback_bytes() -> int | None:
    """Return the bytes received on the loopback interface since boot; None if the system does not report them.

    Every byte sent over loopback is received there once. Traffic of other programs is included.
    """
    counters = psutil.net_io_counters(pernic=True, nowrap=False).get("lo")
    return counters and int(counters.bytes_recv)


@dataclass(frozen=True, slots=True)
class WireFigures:
    """Bytes per completion token: in the envelope only, and in total on the loopback interface."""

    envelope_bytes_per_token: float
    interface_bytes_per_token: float | None


def random_group(
    identity: Identity, number: int, rng: np.random.Generator, *, num_tokens: int = COMPLETION_TOKENS
) -> Group:
    """Return a random group with Qwen-like ids and log-probs; `num_tokens` in each completion."""
    return Group.from_completions(
        run_id=RUN_ID,
        sender=identity.peer_id,
        number=number,
        prompt_ref=PromptRef("gsm8k", "train", number),
        problem_hash=bytes(16),
        prompt_hash=hash_prompt([number]),
        completions=tuple(
            Completion(
                token_ids=rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32),
                logprobs=-rng.exponential(0.5, num_tokens).astype(np.float32),
                finish_reason=FinishReason.LENGTH,
                reward=float(rng.integers(0, 2)),
                policy_version=1,
                policy_version_newest=1,
            )
            for _ in range(NUM_COMPLETIONS)
        ),
        sampling=SamplingSettings(),
        model="Qwen/Qwen2.5-3B",
        tokenizer="0" * 32,
        created_at=time.time(),
    )


async def measure_wire(folder: Path) -> WireFigures:
    """Send `NUM_GROUPS` groups between two nodes over loopback. Raises NetworkError if they do not arrive."""
    identity = Identity.generate()
    held = _make_groups(identity)
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(_member(folder / "a", identity, held))
        peer = sender.addresses[:1]
        receiver = await stack.enter_async_context(_member(folder / "b", Identity.generate(), {}, peers=peer))
        await _meet(sender, receiver)
        await asyncio.sleep(SETTLE_S)
        before = loopback_bytes()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await _transfer(sender, receiver, held)
        except TimeoutError:
            raise NetworkError(f"{NUM_GROUPS} groups did not arrive over loopback within {TIMEOUT_S:.0f} s") from None
        after = loopback_bytes()
    tokens = NUM_GROUPS * NUM_COMPLETIONS * COMPLETION_TOKENS
    envelope_bytes = sum(len(body) for _, body in held.values())
    crossed = (after - before) / tokens if before is not None and after is not None else None
    return WireFigures(envelope_bytes / tokens, crossed)


def _make_groups(identity: Identity) -> Held:
    rng = np.random.default_rng(0)
    held: Held = {}
    for number in range(1, NUM_GROUPS + 1):
        group = random_group(identity, number, rng)
        envelope = seal_group(group, identity)
        body = envelope.to_bytes()
        held[envelope.id] = (announce_group(envelope, group, envelope_bytes=len(body)).to_bytes(), body)
    return held


@asynccontextmanager
async def _member(folder: Path, identity: Identity, held: Held, *, peers: Sequence[str] = ()) -> AsyncIterator[Gossip]:
    """Start a member of the probe's run that serves its bodies."""
    from ftis_node.gossip.libp2p import Libp2pGossip

    settings = NetworkSettings(sockets_dir=folder, listen=("/ip4/127.0.0.1/tcp/0",), peers=tuple(peers))
    node = Libp2pGossip(settings, identity=identity, run_id=RUN_ID)

    async def lookup(ids: Sequence[bytes]) -> list[bytes]:
        return [held[group_id][1] for group_id in ids if group_id in held]

    node.serve(lookup)
    try:
        await node.start()
        yield node
    finally:
        await node.close()


async def _meet(sender: Gossip, receiver: Gossip) -> None:
    """Wait until both nodes know each other as members. Raises NetworkError after a time-out."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if receiver.peer_id in await sender.members() and sender.peer_id in await receiver.members():
                    return
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        raise NetworkError(f"two nodes did not meet over loopback within {TIMEOUT_S:.0f} s") from None


async def _transfer(sender: Gossip, receiver: Gossip, held: Held) -> None:
    """Announce all groups; the receiver pulls each body once and confirms it."""
    announcing = asyncio.create_task(_announce_all(sender, [announcement for announcement, _ in held.values()]))
    batch: list[bytes] = []
    num_received = 0
    async for announcement in receiver.announcements():
        batch.append(open_announcement(announcement.payload).id)
        if len(batch) == PULL_BATCH or num_received + len(batch) == len(held):
            fetched = await receiver.fetch(announcement.sender, batch)
            await receiver.confirm(announcement.sender, batch)
            num_received += len(fetched.bodies)
            batch = []
        if num_received == len(held):
            break
    await announcing


async def _announce_all(sender: Gossip, announcements: Sequence[bytes]) -> None:
    for announcement in announcements:
        await sender.announce(announcement)
