"""Log lines: one form for daemon and workers, to stderr or to a file of the home."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def set_up_logging(*, debug: bool = False) -> None:
    """Sends the project's log lines to stderr; with `debug` also the libraries' and everything below INFO."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    logging.getLogger("ftis_node").setLevel(logging.DEBUG if debug else logging.INFO)
