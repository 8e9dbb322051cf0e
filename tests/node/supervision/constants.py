"""`ftis-node` with other constants, for tests that cannot wait as long as a node of a user does.

`started(..., constants={"ftis_node.node.loops.directory.RECORD_PERIOD_S": 2.0})` runs it.
"""

import json
import os
from importlib import import_module

from ftis_node.__main__ import main

CONSTANTS = "TEST_CONSTANTS"  # environment variable with a JSON object: the value of each name


def set_constants(text: str) -> None:
    """Set them in this order: modules copy constants when they are first imported.

    Raises AttributeError for a name that does not exist.
    """
    for name, value in json.loads(text).items():
        module, _, constant = name.rpartition(".")
        getattr(import_module(module), constant)
        setattr(import_module(module), constant, value)


if __name__ == "__main__":
    set_constants(os.environ[CONSTANTS])
    main()
