"""Silencer of libraries whose warnings would hide the lines that a user should read.

transformers, peft (which imports bitsandbytes) and huggingface_hub warn and log on stderr. Errors are still exceptions.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
