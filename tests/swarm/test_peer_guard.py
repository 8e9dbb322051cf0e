"""The guard counts and charges exceptions that a peer's values cause; the node's own faults pass through."""

import asyncio
import errno
import logging
import sqlite3

import pytest

from ftis_node.errors import DamagedError, MachineError, RecordError, WorkerDiedError
from ftis_node.swarm.peer_guard import FIRST_PAUSE_S, MAX_KINDS, PeerGuard, Place, is_own

PEER = "12D3KooWpeer"


def test_an_exception_is_swallowed_counted_and_charged_once():
    charged: list[tuple[str, Place, str]] = []
    guard = PeerGuard(lambda peer_id, place, error: charged.append((peer_id, place, str(error))))
    with guard.work_for(PEER, Place.PULL) as work:
        raise OverflowError("too large")
    assert work.failed
    assert (charged, guard.num_faults) == ([(PEER, Place.PULL, "too large")], {Place.PULL: 1})


def test_a_peer_pauses_for_twice_as_long_after_each_fault():
    now = 0.0
    guard = PeerGuard(clock=lambda: now)
    for num_before in range(3):
        with guard.work_for(PEER, Place.HELLO):
            raise ValueError("invalid")
        assert not guard.may_work(PEER)
        assert guard.may_work("another peer")
        now += FIRST_PAUSE_S * 2**num_before - 0.1
        assert not guard.may_work(PEER)
        now += 0.2
        assert guard.may_work(PEER)


@pytest.mark.parametrize(
    "error",
    [
        MachineError("no memory"), DamagedError("a damaged file"), WorkerDiedError("the learner ended"),
        sqlite3.OperationalError("database or disk is full"),
        sqlite3.DatabaseError("database disk image is malformed"), OSError(errno.ENOSPC, "No space left on device"),
        ExceptionGroup("several", [ValueError("a peer's"), OSError(errno.EIO, "Input/output error")]),
        asyncio.CancelledError(), KeyboardInterrupt(),
    ],
)  # fmt: skip
def test_the_nodes_own_faults_pass_through(error):
    guard = PeerGuard()
    with pytest.raises(type(error)), guard.work_for(PEER, Place.STORE):
        raise error
    assert not guard.num_faults


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.DataError("string or blob too big"), sqlite3.IntegrityError("constraint"),
        OverflowError("Python int too large to convert to SQLite INTEGER"), RecursionError("deep"),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), RecordError("parse", "no envelope"),
        OSError(errno.ECONNRESET, "reset"), AssertionError("impossible"),
        ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    ],
)  # fmt: skip
def test_errors_that_a_value_can_cause_are_the_peers_fault(error):
    assert not is_own(error)
    with PeerGuard().work_for(PEER, Place.STORE) as work:
        raise error
    assert work.failed


def test_a_lack_of_resources_is_counted_but_not_charged():
    charged: list[str] = []
    guard = PeerGuard(lambda peer_id, place, error: charged.append(peer_id))
    for error in (OSError(errno.EMFILE, "Too many open files"), MemoryError()):
        with guard.work_for(PEER, Place.SERVE) as work:
            raise error
        assert work.failed
    assert (guard.num_faults[Place.SERVE], charged) == (2, [])


def test_each_kind_of_error_is_logged_once_and_the_kinds_are_bounded(caplog):
    guard = PeerGuard()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with guard.work_for(PEER, Place.RECORD):
                raise ValueError("the same")
        assert len(caplog.records) == 1
        assert "failed at record" in caplog.text
        for number in range(2 * MAX_KINDS):
            with guard.work_for(PEER, Place.RECORD):
                raise type(f"Error{number}", (Exception,), {})
    assert len(caplog.records) == MAX_KINDS


@pytest.mark.parametrize("cleanup_fails", [False, True])
async def test_work_that_is_cancelled_ends(cleanup_fails):
    """Otherwise the task continues, also after a clean-up that fails, and the node never ends."""
    guard, began = PeerGuard(), asyncio.Event()

    async def work():
        while True:
            with guard.work_for(PEER, Place.PULL):
                try:
                    began.set()
                    await asyncio.Event().wait()
                finally:
                    if cleanup_fails:
                        raise ValueError("the clean-up failed")

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work())
        await began.wait()
        task.cancel()
    assert task.cancelled()
    assert guard.num_faults == ({Place.PULL: 1} if cleanup_fails else {})


async def test_a_time_limit_around_guarded_work_passes_through():
    guard = PeerGuard()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            with guard.work_for(PEER, Place.PULL):
                try:
                    await asyncio.sleep(5)
                finally:
                    raise ValueError("the clean-up failed")


def test_a_failure_to_charge_a_peer_is_logged_and_swallowed(caplog):
    def charge(peer_id, place, error):
        raise UnicodeEncodeError("utf-8", peer_id, 0, 1, "surrogates not allowed")

    guard = PeerGuard(charge)
    with guard.work_for(PEER, Place.STORE) as work:
        raise ValueError("invalid")
    assert work.failed
    assert not guard.may_work(PEER), "the peer is paused anyway"
    assert "UnicodeEncodeError" in caplog.text


def test_a_disk_that_fails_while_a_peer_is_charged_is_the_nodes_own_fault():
    def charge(peer_id, place, error):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), PeerGuard(charge).work_for(PEER, Place.STORE):
        raise ValueError("invalid")
