"""The progress line of a node's start: the components that are not ready, and the phase of the engine's start."""

from __future__ import annotations

import time

from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.log import OnProgress


class StartProgress:
    """Observer of a start. It shows a line such as `generator: compiling; loading m (3.2 MB) into learner; connecting`.

    `parts` are the components that the node waits for. Restarts of the engine after the start give events only.
    """

    def __init__(self, parts: list[str], model: str, events: EventLog, show: OnProgress) -> None:
        self._parts = [*parts]
        self._model = model
        self._events = events
        self._show = show
        self._phase = ""
        self._began_s = 0.0
        self._show_line()

    def __str__(self) -> str:
        workers = [name for name in self._parts if name != "network"]
        phase = f"generator: {self._phase}" if self._phase and "generator" in workers else ""
        loading = " and ".join(name for name in workers if not (phase and name == "generator"))
        lines = (phase, loading and f"loading {self._model} into {loading}", "connecting" * ("network" in self._parts))
        return "; ".join(filter(None, lines))

    def end(self, part: str) -> None:
        """Stop waiting for that component."""
        self._parts.remove(part)
        self._show_line()

    def begin_phase(self, phase: str) -> None:
        """Note that a phase of the engine's start begins, which ends the one before; "" after the last one."""
        now_s = time.monotonic()
        if self._phase:
            self._events.write("engine_start", phase=self._phase, duration_s=round(now_s - self._began_s, 1))
        self._phase, self._began_s = phase, now_s
        if "generator" in self._parts:
            self._show_line()

    def _show_line(self) -> None:
        self._show(None, str(self))
