"""Behavior of the model libraries in this process: less logging, fewer imports.

transformers imports scipy with every model, for the loss of object detection, and vLLM for sound. That takes up to 1 s
of processor time and 35 MB in each worker. transformers asks once whether it is installed, and remembers that.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

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


def import_quickly(name: str) -> None:
    """Import a module that imports the model libraries, without garbage collections and with scipy as missing.

    Collections take a fifth of the time of vLLM's import, and find nothing. scipy stays usable if it is loaded already.
    """
    if name in sys.modules:
        return
    hides = UNUSED not in sys.modules
    gc.disable()
    try:
        if hides:
            sys.modules[UNUSED] = None  # type: ignore[assignment]  # `find_spec` then finds nothing
            from transformers.utils import is_scipy_available

            is_scipy_available.cache_clear()  # of an import of transformers before this one
            is_scipy_available()
        import_module(name)
    finally:
        if hides:
            del sys.modules[UNUSED]
        gc.freeze()  # later collections do not visit what was imported
        atexit.register(gc.unfreeze)  # else the bindings of Triton report at the end that they leak
        gc.enable()
