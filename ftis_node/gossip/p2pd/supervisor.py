"""Keeps one p2pd up for as long as the node runs: watches it, and starts it again when it dies or stops answering.

What is done with it is the caller's `work`, a coroutine for each life of p2pd. It never returns; OSError and EOFError
out of it mean that p2pd no longer answers, anything else is a fault of ours and ends the link.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError, MachineError, UsageError
from ftis_node.gossip.interface import SwarmPhase, SwarmState
from ftis_node.gossip.p2pd.cancellation import cancel_and_wait
from ftis_node.gossip.p2pd.ports import pin_ports
from ftis_node.gossip.p2pd.session import open_session
from ftis_node.telemetry.faults import report

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ftis_node.gossip.p2pd.session import P2pdConfig, Session

    Work = Callable[[Session, Callable[[], None]], Awaitable[None]]

logger = logging.getLogger(__name__)


class P2pdSupervisor:
    """One node's hold on the network. `session` is None while p2pd is down."""

    def __init__(self, config: P2pdConfig, work: Work, *, on_end: Callable[[BaseException | None], None]) -> None:
        self._config = config
        self._work = work
        self._on_end = on_end
        self._listen = config.settings.listen_addresses
        self._runner: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()
        self._down_reason = "the network process is starting"
        self._next_start_at: float | None = None
        self.session: Session | None = None

    async def start(self) -> None:
        """Brings p2pd up for the first time. Raises UsageError or MachineError where that fails."""
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
            self._runner.result()  # raises
        self._runner.add_done_callback(self._tell_end)
        self._runner.add_done_callback(report)  # also where nobody listens to announcements

    async def close(self) -> None:
        """Takes p2pd down."""
        if self._runner is None:
            self._on_end(None)
        else:
            self._runner.cancel()
            await asyncio.wait({self._runner})

    def down_state(self) -> SwarmState:
        """The state to show while there is no session."""
        if self._next_start_at is None:
            return SwarmState(SwarmPhase.STARTING, self._down_reason)
        wait_s = max(0.0, self._next_start_at - asyncio.get_running_loop().time())
        return SwarmState(SwarmPhase.STARTING, f"{self._down_reason}, starting it again in {wait_s:.0f} s")

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        restart = self._config.settings.restart
        num_failures = 0
        while True:
            began_at = clock()
            self._down_reason = await self._one_life()
            if clock() - began_at > restart.ceiling_s:
                num_failures = 0
            num_failures += 1
            self._config.counters.restarts += 1
            delay_s = restart.delay_s(num_failures, draw=random.random())
            self._next_start_at = clock() + delay_s
            logger.warning("%s; starting it again in %.1f s", self._down_reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _one_life(self) -> str:
        """From a start to its end; how it ended."""
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(open_session(self._config, listen=self._listen))
            except (FtisError, OSError, EOFError) as error:
                return self._failed_to_start(error)
            self._listen = pin_ports(self._config.settings.listen_addresses, session.listening_on)
            try:
                self._down_reason = f"the network process ended ({await self._live(session)})"
            finally:
                self.session, self._next_start_at = None, None
            return self._down_reason

    def _failed_to_start(self, error: FtisError | OSError | EOFError) -> str:
        """What to say of a failed start. Before the first success it is raised: then the user can do something."""
        if self._is_up.is_set():
            if isinstance(error, UsageError):  # our old port went to somebody else meanwhile
                self._listen = self._config.settings.listen_addresses
            return f"the network process did not start ({error})"
        if isinstance(error, FtisError):
            raise error
        raise MachineError(f"the network process p2pd was lost while it started: {error!r}") from error

    async def _live(self, session: Session) -> str:
        """Does the work until p2pd is lost; how it was lost."""

        def on_ready() -> None:
            self.session = session
            self._is_up.set()

        work = asyncio.ensure_future(self._work(session, on_ready))
        lost = asyncio.create_task(session.lost())
        try:
            await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                if not is_loss(work.exception()):
                    work.result()  # raises
                await asyncio.wait({lost}, timeout=self._config.settings.poll_s)
            return lost.result() if lost.done() else "it no longer answers"
        finally:
            await cancel_and_wait(work, lost)  # what p2pd's end does to them is no news

    def _tell_end(self, runner: asyncio.Task[None]) -> None:
        error = None if runner.cancelled() else runner.exception()
        if error is not None:
            logger.error("the network stopped on a fault of ours", exc_info=error)
        self._on_end(error)


def is_loss(error: BaseException | None) -> bool:
    """Whether an error of the work, or each of a group of them, says that p2pd is gone or hangs."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_loss, error.exceptions))
    return isinstance(error, OSError | EOFError)
