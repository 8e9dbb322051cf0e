"""Behavior of the model libraries in this process: less logging, fewer imports.

transformers imports scipy with every model, for the loss of object detection: 0.5 s of processor time and 35 MB in each
worker. It asks once whether the package is installed and remembers the answer.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

CHATTY_LOGGERS = ("transformers", "huggingface_hub", "peft", "bitsandbytes", "httpx", "httpx2")
UNUSED = "scipy"


@contextmanager
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


def skip_unused_packages() -> None:
    """Make transformers treat scipy as not installed, unless it is loaded. Call before models are imported."""
    if UNUSED in sys.modules:
        return
    sys.modules[UNUSED] = None  # type: ignore[assignment]  # `find_spec` then finds nothing
    try:
        from transformers.utils import is_scipy_available

        is_scipy_available()
    finally:
        del sys.modules[UNUSED]
