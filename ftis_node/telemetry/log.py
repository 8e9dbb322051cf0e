"""Logging of daemon and workers: text or JSON lines, and a rate limit for repeated faults.

A record may have two extra attributes: `fields` holds values by name for the JSON form, `bare` marks text without time
and level.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ftis_node.telemetry.secrets import SecretFreeFormatter, keep_variables_secret, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
PLAIN_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
DATE_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
BARE = {"bare": True}
PERIOD_S = 60.0
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class CurrentStderr(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stderr`, so that a line appears above a progress bar, not inside it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class keeps the stream that it had at construction
        """Return the current standard error."""
        return sys.stderr


class TextFormatter(SecretFreeFormatter):
    """Formatter of text lines with date and time zone. A `bare` record gives only its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redacted(record.getMessage()) if getattr(record, "bare", False) else super().format(record)


class JsonFormatter(SecretFreeFormatter):
    """Formatter of JSON lines: {time, level, logger, message, fields}, and `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        document = {
            "time": self.formatTime(record, DATE_FORMAT),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage().strip()),
            "fields": getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["error"] = redacted(self.formatException(record.exc_info))
        return redacted(json.dumps(_without_nan(document), default=str))


def _without_nan(value: Any) -> Any:
    """Return the value with null instead of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, list | tuple) else value


def log_as_json() -> None:
    """Write JSON lines from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())


def is_json() -> bool:
    """Return whether log lines are JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def log_block(logger: logging.Logger, lines: Iterable[str]) -> None:
    """Log the lines of a block for people, without time and level."""
    for line in lines:
        logger.info("%s", line, extra=BARE)


def set_up_logging(*, debug: bool = False, plain: bool = False) -> None:
    """Send the project's log lines to stderr; with `debug` also those of libraries and all levels.

    `plain` omits the module name, which means nothing to an operator.
    """
    keep_variables_secret()
    handler = CurrentStderr()
    handler.setFormatter(TextFormatter(PLAIN_FORMAT if plain else FORMAT, datefmt=DATE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    logging.getLogger("ftis_node").setLevel(logging.DEBUG if debug else logging.INFO)


@dataclass(slots=True)
class RateLimitedLog:
    """Rate limiter for the log lines of one repeated fault. `count` is the number of occurrences."""

    period_s: float = PERIOD_S
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _logged_at: float | None = field(default=None)

    def is_due(self) -> bool:
        """Count one occurrence; return whether `period_s` has passed since the last logged one."""
        self.count += 1
        now = self.clock()
        if self._logged_at is not None and now - self._logged_at < self.period_s:
            return False
        self._logged_at = now
        return True


def is_out_of_files(error: BaseException) -> bool:
    """Return whether the process, or the machine, has no free file descriptor; a temporary condition.

    SQLite has one error code for every file that it cannot open. At the descriptor limit, that limit is the reason.
    """
    if isinstance(error, OSError):
        return error.errno in NO_DESCRIPTOR
    import sqlite3  # `--help` sets up logging and must not load it

    return isinstance(error, sqlite3.OperationalError) and (
        getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN
    )
