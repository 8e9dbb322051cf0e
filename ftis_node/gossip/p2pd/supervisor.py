"""Keeps one p2pd running while the node runs: watches it, and restarts it if it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from ftis_node.errors import FtisError, MachineError, UsageError
from ftis_node.gossip.p2pd.client import first_done
from ftis_node.gossip.p2pd.process import pin_ports
from ftis_node.gossip.p2pd.session import Session, open_session
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.types import SwarmPhase, SwarmState
from ftis_node.telemetry.faults import report

Work = Callable[[Session, Callable[[], None]], Awaitable[None]]


logger = logging.getLogger(__name__)


class P2pdSupervisor:
    """Process supervisor with exponential back-off. `session` is None while p2pd is down.

    `work` runs once for each session and never returns by itself. OSError and EOFError from it mean that p2pd no longer
    answers; any other exception is an internal error and ends the supervisor.
    """

    def __init__(self, parts: SessionParts, work: Work, *, on_end: Callable[[BaseException | None], None]) -> None:
        self._parts = parts
        self._work = work
        self._on_end = on_end
        self._listen = parts.settings.listen_addresses
        self._runner: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()
        self._down_reason = "the network process is starting"
        self._next_start_at: float | None = None
        self.session: Session | None = None

    async def start(self) -> None:
        """Start p2pd for the first time. Raises UsageError or MachineError if that fails."""
        self._runner = asyncio.create_task(self._run(), name="gossip-link")
        is_up = asyncio.create_task(self._is_up.wait())
        try:
            await asyncio.wait({is_up, self._runner}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            is_up.cancel()
        if self._runner.done():
            self._runner.result()  # raises the error of the failed start
        self._runner.add_done_callback(self._report_end)
        self._runner.add_done_callback(report)  # even if announcements have no reader

    async def close(self) -> None:
        if self._runner is None:
            self._on_end(None)
        else:
            self._runner.cancel()
            await asyncio.wait({self._runner})

    def down_state(self) -> SwarmState:
        if self._next_start_at is None:
            return SwarmState(SwarmPhase.STARTING, self._down_reason)
        wait_s = max(0.0, self._next_start_at - asyncio.get_running_loop().time())
        return SwarmState(SwarmPhase.STARTING, f"{self._down_reason}, restarting it in {wait_s:.0f} s")

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        restart = self._parts.settings.restart
        num_failures = 0
        while True:
            began_at = clock()
            self._down_reason = await self._run_session()
            if clock() - began_at > restart.ceiling_s:
                num_failures = 0
            num_failures += 1
            self._parts.counters.restarts += 1
            delay_s = restart.delay_s(num_failures, draw=random.random())
            self._next_start_at = clock() + delay_s
            logger.warning("%s; restarting it in %.1f s", self._down_reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_session(self) -> str:
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(open_session(self._parts, listen=self._listen))
            except (FtisError, OSError, EOFError) as error:
                return self._failed_to_start(error)
            self._listen = pin_ports(self._parts.settings.listen_addresses, session.listening_on)
            try:
                self._down_reason = f"the network process ended ({await self._work_until_lost(session)})"
            finally:
                self.session, self._next_start_at = None, None
            return self._down_reason

    def _failed_to_start(self, error: FtisError | OSError | EOFError) -> str:
        """Return the cause of a failed start. Before the first success raise it, because the user can fix it."""
        if self._is_up.is_set():
            if isinstance(error, UsageError):  # another program has taken our old port
                self._listen = self._parts.settings.listen_addresses
            return f"the network process did not start ({error})"
        if isinstance(error, FtisError):
            raise error
        raise MachineError(f"the network process p2pd was lost while it started: {error!r}") from error

    async def _work_until_lost(self, session: Session) -> str:

        def on_ready() -> None:
            self.session = session
            self._is_up.set()

        # At the end of the block errors of both are dropped: those that p2pd's end causes are expected.
        async with first_done(self._work(session, on_ready), session.lost()) as (work, lost):
            if work.done():
                if not is_loss(work.exception()):
                    work.result()  # raises the internal error
                await asyncio.wait({lost}, timeout=self._parts.settings.poll_s)
            return str(lost.result()) if lost.done() else "it no longer answers"

    def _report_end(self, runner: asyncio.Task[None]) -> None:
        error = None if runner.cancelled() else runner.exception()
        if error is not None:
            logger.error("network stopped by an internal error", exc_info=error)
        self._on_end(error)


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error, or each one of an exception group, means that p2pd has ended or hangs."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_loss, error.exceptions))
    return isinstance(error, OSError | EOFError)
