"""The base class of the daemon's worker clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.errors import FtisError
    from ftis_node.workers.supervisor import Supervisor, WorkerState


class WorkerClient:
    """The base class of a worker's client: it delegates the process's life to a supervisor. Subclasses add requests."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def worker_state(self) -> WorkerState:
        """Return the worker's state."""
        return self._supervisor.state

    @property
    def restarts(self) -> int:
        """Return the number of restarts after a death."""
        return self._supervisor.restarts

    @property
    def pid(self) -> int | None:
        """Return the worker's process id."""
        return self._supervisor.pid

    @property
    def last_error(self) -> FtisError | None:
        """Return the cause of the last process's end; None before any."""
        return self._supervisor.last_error

    async def run(self) -> None:
        """Keep the worker alive until canceled, then stop it. Raises after the last failed restart."""
        await self._supervisor.run()

    async def wait_ready(self) -> None:
        """Return when the worker takes calls, also after a death. Raises if no restart follows."""
        await self._supervisor.wait_ready()

    async def stop(self) -> None:
        """Stop the worker, which first saves its state. Calls in flight raise WorkerDiedError."""
        await self._supervisor.stop()

    def restart(self, how: str) -> None:
        """Kill the worker; the supervisor starts the next one. `how` completes the sentence "the worker ..."."""
        self._supervisor.restart(how)
