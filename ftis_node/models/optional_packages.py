"""Stop transformers from importing packages that no worker uses.

transformers imports scipy with every model, for the loss of object detection: 0.5 s of processor time and 35 MB in each
worker. It asks once whether the package is installed and remembers the answer.
"""

from __future__ import annotations

import sys

UNUSED = "scipy"


def skip_unused_packages() -> None:
    """Make transformers treat scipy as not installed. Does nothing if scipy is loaded. Call before models are imported.

    Other libraries of the process still find scipy.
    """
    if UNUSED in sys.modules:
        return
    sys.modules[UNUSED] = None  # type: ignore[assignment]  # `find_spec` then finds nothing
    try:
        from transformers.utils import is_scipy_available

        is_scipy_available()
    finally:
        del sys.modules[UNUSED]
