"""Imports of the model libraries in a worker, without what it does not need.

transformers imports scipy with every model, for the loss of object detection, and vLLM for sound. That takes up to 1 s
of processor time and 35 MB in each worker. transformers asks once whether it is installed, and remembers that.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

UNUSED = "scipy"


class Placeholder(ModuleType):
    """A module that has every name, each as an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_quickly(*names: str, without: Iterable[str] = ()) -> None:
    """Import modules that import the model libraries, without garbage collections and with scipy as missing.

    Collections take a fifth of the time of vLLM's import, and find nothing. scipy stays usable if it is loaded already.
    The modules `without` are replaced by placeholders in what is imported; a later import of them loads them.
    """
    if all(name in sys.modules for name in names):
        return
    hides = UNUSED not in sys.modules
    replaced = {name: Placeholder(name) for name in without if name not in sys.modules}
    gc.disable()
    try:
        sys.modules |= replaced
        if hides:
            sys.modules[UNUSED] = None  # type: ignore[assignment]  # `find_spec` then finds nothing
            from transformers.utils import is_scipy_available

            is_scipy_available.cache_clear()  # of an import of transformers before this one
            is_scipy_available()
        for name in names:
            import_module(name)
    finally:
        for name in replaced:
            del sys.modules[name]
        if hides:
            del sys.modules[UNUSED]
        gc.freeze()  # later collections do not visit what was imported
        atexit.register(gc.unfreeze)  # else the bindings of Triton report at the end that they leak
        gc.enable()
