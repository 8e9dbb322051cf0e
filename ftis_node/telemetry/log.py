"""Logging of daemon and workers: text or JSON lines, and a rate limit for repeated faults; progress of long work.

A record may have two extra attributes: `fields` holds values by name for the JSON form, `bare` marks text without time
and level. Standard files may be closed, on a full disk, or a pipe without a reader. A line that cannot be written is
dropped, and the node continues.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO, TypeAlias

from ftis_node.telemetry.secrets import keep_variables_secret, redacted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Takes the fraction done, from 0 to 1 (None: unknown), and a text about the current work ("": the work has ended).
OnProgress: TypeAlias = Callable[[float | None, str], None]
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
PLAIN_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
DATE_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
BARE = {"bare": True}
PERIOD_S = 60.0
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
CHATTY_LOGGERS = ("transformers", "huggingface_hub", "peft", "bitsandbytes", "httpx", "httpx2")
STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2


def unwatched(fraction: float | None, what: str) -> None:
    """Discard progress."""


def open_closed_files() -> None:
    """Open /dev/null for each closed standard file, because a later file would otherwise get its descriptor."""
    for number in (STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(STANDARD_INPUT, encoding="utf-8", closefd=False)  # open for the lifetime of the process
    if sys.stdout is None:
        sys.stdout = text_that_may_be_lost(STANDARD_OUTPUT)
    if sys.stderr is None:
        sys.stderr = text_that_may_be_lost(STANDARD_ERROR)


def drop_what_cannot_be_written() -> None:
    """Drop output that cannot be written: afterwards standard output and error raise no OSError."""
    open_closed_files()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    sys.stdout = text_that_may_be_lost(STANDARD_OUTPUT, like=sys.stdout)
    sys.stderr = text_that_may_be_lost(STANDARD_ERROR, like=sys.stderr)


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that flushing its buffer at exit raises no error."""
    opened = os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, STANDARD_OUTPUT)
    os.close(opened)


def text_that_may_be_lost(number: int, *, like: TextIO | None = None) -> TextIO:
    """Return a text stream on a descriptor. It drops lines that it cannot write, and never closes the descriptor."""
    return io.TextIOWrapper(
        _Lossy(number, "wb", closefd=False),
        encoding=(like and like.encoding) or "utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


class _Lossy(io.FileIO):
    """Unbuffered stream that drops data it cannot write."""

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with contextlib.suppress(OSError):  # also BlockingIOError: a full non-blocking pipe
            while rest:
                rest = rest[os.write(self.fileno(), rest) :]
        return size


class CurrentStderr(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stderr`, so that a line appears above a progress bar, not inside it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class keeps the stream that it had at construction
        return sys.stderr


class TextFormatter(logging.Formatter):
    """Formatter of text lines with date and time zone, without secrets. A `bare` record gives only its message."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(record.getMessage() if getattr(record, "bare", False) else super().format(record))


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines without secrets: {time, level, logger, message, fields}, and `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": self.formatTime(record, DATE_FORMAT),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage().strip()),
            "fields": getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["error"] = redacted(self.formatException(record.exc_info))
        text = json.dumps(document, default=str)  # may have NaN, which is no JSON
        return redacted(json.dumps(json.loads(text, parse_constant=lambda _: None)))


def log_as_json() -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())


def is_json() -> bool:
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
    if not debug:  # peft imports it, and it warns of a package that speeds up 4-bit weights on a CPU
        logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)


@dataclass(slots=True)
class RateLimitedLog:
    """Rate limiter for the log lines of one repeated fault. `count` is the number of occurrences."""

    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _logged_at: float | None = field(default=None)

    def is_due(self) -> bool:
        """Count one occurrence; return whether PERIOD_S has passed since the last logged one."""
        self.count += 1
        now = self.clock()
        if self._logged_at is not None and now - self._logged_at < PERIOD_S:
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


@contextlib.contextmanager
def quiet_library_logging() -> Iterator[None]:
    """Inside the context, the model libraries log only errors and do not warn."""
    loggers = [logging.getLogger(name) for name in CHATTY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
