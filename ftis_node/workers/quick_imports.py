"""Imports of the model libraries in a worker, without what it does not need.

transformers imports scipy with every model, for the loss of object detection, and vLLM for sound. That takes up to 1 s
of processor time and 35 MB in each worker. transformers asks once whether it is installed, and remembers that.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module

UNUSED = "scipy"


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
