"""The base of the daemon's clients of its workers."""

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
        """The worker's state."""
        return self._supervisor.state

    @property
    def restarts(self) -> int:
        """The number of restarts after a death."""
        return self._supervisor.restarts

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._supervisor.pid

    @property
    def last_error(self) -> FtisError | None:
        """Why the last worker process ended."""
        return self._supervisor.last_error

    async def run(self) -> None:
        """Keep the worker alive until canceled, then stop it; raises when it is given up."""
        await self._supervisor.run()

    async def wait_ready(self) -> None:
        """Return when the worker serves, also after a death. Raises when it was given up."""
        await self._supervisor.wait_ready()

    async def stop(self) -> None:
        """End the worker, which saves what it must; calls in flight raise WorkerDiedError."""
        await self._supervisor.stop()

    def restart(self, how: str) -> None:
        """Kill the worker, which starts again; `how` ends the sentence "the worker ..."."""
        self._supervisor.restart(how)
