"""The log of vLLM's processes: the stderr of the generation worker and its children, if that is a file.

vLLM may start further processes. Only their log has the cause of their failure, and the phase of their start.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from textwrap import shorten
from typing import Final

logger = logging.getLogger(__name__)

LOST_CORE = "lost vLLM's engine core: its process ended"
MAX_REASON_LENGTH = 240
READ_LOG_BYTES = 1 << 20
STDERR = 2
# vLLM's messages in a process that only detects the failure of another one.
ELSEWHERE = re.compile("root cause|" + re.escape(LOST_CORE))
VLLM_PREFIX = re.compile(r"^(?:\([^)]* pid=\d+\) ?)+(?:ERROR \S+ \S+ \[[^\]]*\] )?")
ERROR_LINE = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception): \S.*)$")
OWN_PHASE = re.compile(r"INFO +ftis_node\S+: start: (.*)")
MESSAGE = re.compile(r"INFO \S+ \S+ \[[^\]]*\] (?:\[[^\]]*\] |Rank \d+: )?(.*)")
# The beginning of a message -> the phase of the start that begins with it (vLLM 0.32, both of its model runners).
PHASES: Final = {
    "Starting to load model": "loading weights",
    "Loading model from scratch": "loading weights",
    "Starting torch.compile": "compiling (first start only)",
    "Directly load AOT compilation": "loading compiled code",
    "torch.compile took": "measuring memory",
    "JIT kernel warmup starting": "warming up kernels",
    "JIT kernel warmup finished": "capturing graphs",
    "Torch profiler disabled for CUDA graph capture": "capturing graphs",
}


class WorkerLog:
    """A reader of the log, from its present end on."""

    def __init__(self) -> None:
        self._began_at = 0
        with suppress(OSError):  # stderr is closed
            self._began_at = os.fstat(STDERR).st_size
        self._read_to = self._began_at

    @property
    def is_file(self) -> bool:
        with suppress(OSError):
            return stat.S_ISREG(os.fstat(STDERR).st_mode)
        return False

    def cause_of(self, text: str) -> str | None:
        """Return the logged error of another process, if `text` only reports that one failed."""
        if not ELSEWHERE.search(text):
            return None
        length = self._length()
        return root_cause(self._read(max(self._began_at, length - READ_LOG_BYTES)).decode(errors="replace"))

    def with_cause(self, text: str) -> str:
        cause = self.cause_of(text)
        return text if cause is None else f"{text} ({cause})"

    def begin(self, phase: str) -> None:
        """Log a phase that vLLM does not log."""
        if self.is_file:
            logger.info("start: %s", phase)

    def new_phases(self) -> list[str]:
        """Return the phases that began in the whole lines since the last call."""
        self._length()
        lines, newline, _ = self._read(self._read_to).rpartition(b"\n")
        self._read_to += len(lines + newline)
        begun = map(phase_of, lines.decode(errors="replace").splitlines())
        return [phase for phase in begun if phase is not None]

    def _length(self) -> int:
        """Return the log's length in bytes. A log that was truncated, as rotation does, is read from its beginning."""
        length = os.fstat(STDERR).st_size if self.is_file else 0
        if length < max(self._began_at, self._read_to):
            self._began_at = self._read_to = 0
        return length

    def _read(self, begin: int) -> bytes:
        with suppress(OSError):  # without /proc
            if self.is_file:
                with open(f"/proc/self/fd/{STDERR}", "rb") as log:
                    log.seek(begin)
                    return log.read(READ_LOG_BYTES)
        return b""


def phase_of(line: str) -> str | None:
    """Return the phase of a start that begins with this line of the log."""
    if (own := OWN_PHASE.search(line)) is not None:
        return own[1]
    found = MESSAGE.search(line)
    return found and next((phase for begin, phase in PHASES.items() if found[1].startswith(begin)), None)


def root_cause(log: str) -> str | None:
    """Return the last error in a log of vLLM's processes that does not refer to another process (`ValueError: ...`)."""
    lines = [VLLM_PREFIX.sub("", line) for line in log.splitlines()]
    errors = [found[1] for line in lines if (found := ERROR_LINE.match(line))]
    own = [error for error in errors if not ELSEWHERE.search(error)]
    return shorten(own[-1], MAX_REASON_LENGTH, placeholder=" ...") if own else None
