"""Keeps libraries from talking over the one line that a user should read.

transformers, peft (which imports bitsandbytes) and huggingface_hub warn and log on stderr. Errors still come out as
exceptions; what is silenced is the chatter around them.
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
    """Inside, the model libraries log errors only and warn nothing."""
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
