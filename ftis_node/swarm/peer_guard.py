"""Contains exceptions in work for one peer, so that they never end the node, and pauses peers after failures.

    with guard.work_for(peer_id, Place.RECORD) as work:
        figures.record = open_peer_record(data)
    if work.failed:
        ...  # counted, logged and charged already

Readers refuse invalid input with a named reason (`RecordError`). This barrier catches the unexpected exceptions at
each boundary (`Place`) through which an item of a peer enters. One barrier is around the work on one item, and code
inside has no further ones. Each exception is counted; each kind is logged once. The peer is paused, for twice as long
after each fault, and `on_fault` charges it. Faults of this node itself pass through: a full disk, a damaged database, a
dead worker.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import time
import traceback
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.errors import DamagedError, MachineError, WorkerError

OnFault = Callable[[str, "Place", Exception], None]


log = logging.getLogger(__name__)

UNPROVEN = ""  # instead of a peer id if the origin of a value is not authenticated; no peer is charged
FIRST_PAUSE_S = 5.0
MAX_KINDS = 64  # kinds of faults that are logged, each once
MAX_LOGGED_ID = 64  # characters; a peer may have chosen the id
OWN_ERRORS = (MachineError, DamagedError, WorkerError, sqlite3.OperationalError)
OWN_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})  # of the disk
SCARCE_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Place(StrEnum):
    """Place of work for a peer. The value appears in the event `peer_fault` and in the log."""

    DIAL = "dial"  # its addresses
    HELLO = "hello"  # the query whether it is a member of the run
    MESSAGE = "message"  # a gossipsub message, before it is parsed
    ANNOUNCEMENT = "announcement"
    DIRECTORY = "directory"  # an entry of the directory
    RECORD = "record"  # its directory record
    CATCH_UP = "catch_up"  # its answers to queries about the groups that it holds
    PULL = "pull"  # a request for envelopes
    SERVE = "serve"  # a stream that it opened
    JUDGE = "judge"  # the validation of an envelope
    STORE = "store"  # an accepted group, into the buffer
    COUNT = "count"  # a validation result, into metrics, reputation and events
    CONFIRM = "confirm"  # a confirmation to it or by it
    AUDIT = "audit"
    WEIGHTS = "weights"  # offers and chunks of the followed learner
    PRESENCE = "presence"  # its connections and addresses
    STATUS = "status"  # its row in the status


class PeerWork:
    """Context manager for one piece of work: suppresses the peer's faults. `failed` is true if it suppressed one."""

    __slots__ = ("_guard", "_num_cancels", "_passes", "_peer_id", "_place", "failed")

    def __init__(self, guard: PeerGuard, peer_id: str, place: Place, passes: tuple[type[Exception], ...]) -> None:
        self._guard, self._peer_id, self._place, self._passes = guard, peer_id, place, passes
        self._num_cancels = 0
        self.failed = False

    def __enter__(self) -> Self:
        self._num_cancels = _num_cancels()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or is_own(error, passes=self._passes):
            return False
        self.failed = True
        self._guard.note(self._peer_id, self._place, error)
        if _num_cancels() > self._num_cancels and _hides_cancellation(error):
            raise asyncio.CancelledError from error  # otherwise a canceled task would continue
        return True


class PeerGuard:
    """Exception barrier for work for peers. `on_fault` charges the peer, unless memory or file descriptors ran out."""

    def __init__(self, on_fault: OnFault | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_fault = on_fault
        self.num_faults: Counter[Place] = Counter()
        self._clock = clock
        self._pauses = BackoffTable[str](doubling(FIRST_PAUSE_S))
        self._logged: set[str] = set()

    def work_for(self, peer_id: str, place: Place, *, passes: tuple[type[Exception], ...] = ()) -> PeerWork:
        """Return the context for one piece of work. Exceptions of the types in `passes` are not suppressed."""
        return PeerWork(self, peer_id, place, passes)

    def may_work(self, peer_id: str) -> bool:
        return self._pauses.is_due(peer_id, now=self._clock())

    def note(self, peer_id: str, place: Place, error: Exception) -> None:
        self.num_faults[place] += 1
        self._pauses.failed(peer_id, now=self._clock())
        self._log_once(peer_id, place, error)
        is_scarcity = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SCARCE_ERRNOS)
        if self.on_fault is None or is_scarcity:
            return
        try:
            self.on_fault(peer_id, place, error)
        except Exception as failure:  # charging a peer is work for that peer, too
            if is_own(failure):
                raise
            self._log_once(peer_id, place, failure)

    def _log_once(self, peer_id: str, place: Place, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        kind = f"{place} {type(error).__name__} {[(frame.filename, frame.lineno) for frame in last]}"
        if kind in self._logged or len(self._logged) >= MAX_KINDS:
            return
        self._logged.add(kind)
        what = "work for peer %s failed at %s; the node continues, and this kind is not logged again"
        log.error(what, ascii(peer_id)[1:-1][:MAX_LOGGED_ID], place, exc_info=error)


def is_own(error: BaseException, *, passes: tuple[type[Exception], ...] = ()) -> bool:
    """Return whether an error, or one in an exception group, is this node's own, so that no peer caused it."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_own(inner, passes=passes) for inner in error.exceptions)
    if not isinstance(error, Exception) or isinstance(error, (*OWN_ERRORS, *passes)):
        return True
    if type(error) is sqlite3.DatabaseError:  # a damaged file; subclasses report invalid values
        return True
    return isinstance(error, OSError) and error.errno in OWN_ERRNOS


def _num_cancels() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread
        return 0
    return 0 if task is None else task.cancelling()


def _hides_cancellation(error: BaseException) -> bool:
    """Return whether an error was raised while a cancellation was pending, for example by clean-up code."""
    context = error.__context__
    while context is not None and not isinstance(context, asyncio.CancelledError):
        context = context.__context__
    return context is not None
