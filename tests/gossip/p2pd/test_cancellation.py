"""Cancellation of work that may lose it: no task waits for such work forever."""

import asyncio

import pytest

from ftis_node.gossip.p2pd.client import cancel_and_wait, shielded_call


class LosesCancellations:
    """Work that loses its first cancellations, as `asyncio.wait_for` may."""

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


async def test_a_cancelled_caller_ends_at_once():
    stub = LosesCancellations(1)
    waiting = asyncio.create_task(shielded_call(stub.work(), timeout_s=30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 30)
    assert not stub.has_ended
    (remaining,) = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel_and_wait(remaining)


async def test_a_call_times_out_or_returns_its_result_or_raises_its_error():
    stub = LosesCancellations(0)
    with pytest.raises(TimeoutError):
        await shielded_call(stub.work(), timeout_s=0.01)
    await asyncio.sleep(0)
    assert stub.has_ended

    async def call(result):
        if not result:
            raise ValueError("no result")
        return result

    assert await shielded_call(call("yes"), timeout_s=5) == "yes"
    with pytest.raises(ValueError, match="no result"):
        await shielded_call(call(""), timeout_s=5)


async def test_tasks_that_lose_a_cancellation_are_cancelled_until_they_end(monkeypatch):
    monkeypatch.setattr("ftis_node.gossip.p2pd.client.CANCEL_AGAIN_S", 0.01)
    works = [LosesCancellations(0), LosesCancellations(3)]
    tasks = [asyncio.create_task(each.work()) for each in works]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancel_and_wait(*tasks)
    assert [(each.has_ended, each.num_left) for each in works] == [(True, 0), (True, 0)]
