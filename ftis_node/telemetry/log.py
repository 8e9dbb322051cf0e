"""Log lines: one form for daemon and workers, to stderr or to a file of the home."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from ftis_node.telemetry.secrets import SecretFreeFormatter, keep_variables_secret

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
PLAIN_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment, so that lines stand above a progress bar and not in it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class keeps the one of its first day
        """Standard error as of now."""
        return sys.stderr


def set_up_logging(*, debug: bool = False, plain: bool = False) -> None:
    """Sends the project's log lines to stderr; with `debug` also the libraries' and everything below INFO.

    `plain`: without the name of the module, which tells a volunteer nothing.
    """
    keep_variables_secret()
    handler = CurrentStderr()
    handler.setFormatter(SecretFreeFormatter(PLAIN_FORMAT if plain else FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    logging.getLogger("ftis_node").setLevel(logging.DEBUG if debug else logging.INFO)
