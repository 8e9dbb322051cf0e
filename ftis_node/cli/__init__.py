"""Command line: `app.py` has the table of commands, `commands/` has one file a command.

Garbage collection is off while modules load. Modules make no cycles that are worth collecting. The collector would take
8 % of the time of `--help`, and 17 % of that of `status`.
"""

from __future__ import annotations

import gc


def resume_collection() -> None:
    """Turn the collector on, if it is off. It does not visit what exists by now, which lives as long as the process."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
