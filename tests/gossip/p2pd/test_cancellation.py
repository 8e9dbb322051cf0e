"""Cancellation of work that may swallow it: no task waits for it forever."""

from __future__ import annotations

import asyncio

import pytest

from ftis_node.gossip.p2pd.client import cancel_and_wait, shielded_call


class Deaf:
    """Loses the first cancellations, as `asyncio.wait_for` may."""

    def __init__(self, num_lost: int) -> None:
        self.num_left = num_lost
        self.has_ended = False

    async def work(self) -> str:
        try:
            while True:
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    if not self.num_left:
                        raise
                    self.num_left -= 1
        finally:
            self.has_ended = True


async def test_who_is_cancelled_while_it_waits_ends_at_once() -> None:
    deaf = Deaf(1)
    waiting = asyncio.create_task(shielded_call(deaf.work(), timeout_s=30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 30)
    assert not deaf.has_ended
    (left,) = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel_and_wait(left)


async def test_what_takes_too_long_is_a_timeout_and_results_and_errors_come_through() -> None:
    deaf = Deaf(0)
    with pytest.raises(TimeoutError):
        await shielded_call(deaf.work(), timeout_s=0.01)
    await asyncio.sleep(0)
    assert deaf.has_ended

    async def says(word: str) -> str:
        if not word:
            raise ValueError("nothing to say")
        return word

    assert await shielded_call(says("yes"), timeout_s=5) == "yes"
    with pytest.raises(ValueError, match="nothing to say"):
        await shielded_call(says(""), timeout_s=5)


async def test_tasks_that_swallow_a_cancellation_are_cancelled_until_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ftis_node.gossip.p2pd.client.CANCEL_AGAIN_S", 0.01)
    deaf = [Deaf(0), Deaf(3)]
    tasks = [asyncio.create_task(each.work()) for each in deaf]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancel_and_wait(*tasks)
    assert [(each.has_ended, each.num_left) for each in deaf] == [(True, 0), (True, 0)]
