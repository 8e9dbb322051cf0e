"""The base class of the two workers' clients."""

from __future__ import annotations

from ftis_node.workers.supervisor import Supervisor, WorkerState


class WorkerClient:
    """A worker's client: it delegates the process's life to a supervisor. Subclasses add requests."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def worker_state(self) -> WorkerState:
        return self._supervisor.state

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    async def run(self) -> None:
        await self._supervisor.run()

    async def wait_ready(self) -> None:
        await self._supervisor.wait_ready()

    async def stop(self) -> None:
        """Stop the worker, which first saves its state. Calls in flight raise WorkerDiedError."""
        await self._supervisor.stop()

    async def pause(self) -> None:
        """End the worker's process after it has saved its state; calls wait until `resume`."""
        await self._supervisor.pause()

    def resume(self) -> None:
        self._supervisor.resume()

    def restart(self, how: str) -> None:
        self._supervisor.restart(how)
