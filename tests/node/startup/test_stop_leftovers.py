"""What a worker that had to be killed leaves half written goes with the node that is stopped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import Home
from ftis_node.node.startup import assemble as build
from ftis_node.telemetry.events import EventTrail, read_events

if TYPE_CHECKING:
    from pathlib import Path


def test_half_a_checkpoint_is_removed_at_the_end(tmp_path: Path) -> None:
    """The learner has about five seconds to end; on a busy machine it is killed in the middle of a checkpoint."""
    home = Home(tmp_path / "home")
    home.create()
    trail, half = EventTrail(home.events), home.checkpoints / ".step-00000007.incomplete-0a1b2c3d"

    async def ended() -> None:
        half.mkdir()  # by the learner, until it is killed
        (half / "weights.safetensors").touch()

    async def nothing() -> None:
        return

    part, idle = SimpleNamespace(stop=ended), SimpleNamespace(stop=nothing, close=nothing)
    parts: Any = SimpleNamespace(
        generation=idle, learner=part, gossip=idle, scorer=idle, strangers_scorer=idle, home=home, events=trail,
        state=SimpleNamespace(step=6), tracking=_NotTracked(),
    )  # fmt: skip
    asyncio.run(build._stop(parts))
    trail.close()
    assert not half.exists()
    assert [event["step"] for event in read_events(home.events, name="stop")] == [6]


class _NotTracked:
    async def close(self) -> None:
        return

    def __bool__(self) -> bool:
        return False
