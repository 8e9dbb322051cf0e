"""A generator's slots: free again for what a peer has, or nobody wants any more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.node.loops.deliver import DeliverLoop
from ftis_node.node.training.slots import Slots
from tests.node.bookkeeping import bookkeeping
from tests.node.support import manifest_text

GROUP = SimpleNamespace(id=b"group")


@pytest.mark.parametrize(
    ("delivered", "stale", "reason"), [([GROUP], [], "delivered"), ([], [GROUP], "stale")], ids=["delivered", "stale"]
)
async def test_a_group_that_is_done_with_frees_its_slot(delivered: list[Any], stale: list[Any], reason: str) -> None:
    released: list[str] = []

    async def at_once(work: Any, *arguments: Any, **options: Any) -> Any:
        return work(*arguments, **options)

    slots = Slots(1, held=1)
    parts: Any = SimpleNamespace(
        manifest=parse_manifest(manifest_text(foreign_wait_s=1), source="test"),
        settings=NodeSettings(model="m"),
        **bookkeeping(),
        disk=at_once,
        buffer=SimpleNamespace(
            release_delivered=lambda ids: delivered, release_stale=lambda freshness: stale, prune=lambda **_: None
        ),
        reader=SimpleNamespace(own_held=lambda: 0),
        slots=slots,
        events=SimpleNamespace(write=lambda event, **fields: released.append(str(fields["reason"]))),
    )
    await DeliverLoop(parts)._release()
    assert released == [reason]
    async with asyncio.timeout(5):
        await slots.charge()
