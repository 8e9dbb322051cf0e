"""Less logging of the model libraries in this process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

CHATTY_LOGGERS = ("transformers", "huggingface_hub", "peft", "bitsandbytes", "httpx", "httpx2")


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
