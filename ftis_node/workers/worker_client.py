"""The base class of the two workers' clients."""

from __future__ import annotations

from ftis_node.workers.supervisor import Supervisor, WorkerState


class WorkerClient:
    """A worker's client. Its `supervisor` starts, pauses and ends the process. Subclasses add requests."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    @property
    def worker_state(self) -> WorkerState:
        return self.supervisor.state

    @property
    def restarts(self) -> int:
        return self.supervisor.restarts

    @property
    def pid(self) -> int | None:
        return self.supervisor.pid

    async def run(self) -> None:
        await self.supervisor.run()

    async def stop(self) -> None:
        """Stop the worker, which first saves its state. Calls in flight raise WorkerDiedError."""
        await self.supervisor.stop()

    def restart(self, how: str) -> None:
        self.supervisor.restart(how)
