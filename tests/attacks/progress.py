"""What every attack must leave as it was: the victim trains, and honest groups arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim


async def goes_on(victim: Victim, honest: Member) -> None:
    """Waits until the victim has made a step and taken an honest group; nothing is held against who sends them."""
    step = (await victim.status())["learner"]["step"]
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]

    async def has_gone_on() -> bool:
        row = await victim.row(honest.peer_id)
        return bool(row["groups_accepted"] > accepted and (await victim.status())["learner"]["step"] > step)

    await victim.until(has_gone_on)
    assert (await victim.row(honest.peer_id))["standing"] == "good"
