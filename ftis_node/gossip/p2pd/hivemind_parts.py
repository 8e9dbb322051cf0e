"""Imports `hivemind.p2p` and `hivemind.dht` without the rest of hivemind.

The `__init__` files of hivemind and hivemind.utils import torch: 1.5 s of CPU time and 200 MB. The P2P client
and the DHT do not use it. While `only_p2p_and_dht` is active, empty packages with the same search path replace those
`__init__` files. They provide the names that one version imports; any other version is imported in full.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

KNOWN_VERSION = "1.1.12"
UTILITIES = {
    "get_logger": "hivemind.utils.logging",
    "MSGPackSerializer": "hivemind.utils.serializer",
    "SerializerBase": "hivemind.utils.serializer",
    "get_dht_time": "hivemind.utils.timed_storage",
}
"""The names that `hivemind.dht` imports from `hivemind.utils`, and the modules that define them."""


@contextmanager
def only_p2p_and_dht() -> Iterator[None]:
    """Import modules of `hivemind.p2p`, `hivemind.dht` and `hivemind.utils` without torch inside this block.

    Does nothing if hivemind is already imported, or has another version than KNOWN_VERSION. The empty packages are
    removed afterwards: a later `import hivemind` runs the real `__init__` and shares the modules imported here.
    """
    if "hivemind" in sys.modules or metadata.version("hivemind") != KNOWN_VERSION:
        yield
        return
    spec = find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("hivemind is not installed", name="hivemind")
    folder = spec.submodule_search_locations[0]
    empty = [_add_empty("hivemind", folder)]
    try:
        empty += [_add_empty(name, f"{folder}/{name.split('.')[1]}") for name in ("hivemind.utils", "hivemind.dht")]
        for name, module in UTILITIES.items():
            setattr(sys.modules["hivemind.utils"], name, getattr(import_module(module), name))
        yield
    finally:
        for name in empty:
            del sys.modules[name]


def _add_empty(name: str, folder: str) -> str:
    """Add a package without an `__init__` to the imported modules. Returns its name."""
    spec = ModuleSpec(name, loader=None, is_package=True)
    spec.submodule_search_locations = [folder]
    sys.modules[name] = module_from_spec(spec)
    return name
