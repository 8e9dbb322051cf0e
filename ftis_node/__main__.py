"""The console script `ftis-node`, and `python -m ftis_node`."""

from __future__ import annotations

import gc
import os


def main() -> None:
    """Run the command line."""
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes import nothing from the working folder, which may be a model's
    gc.disable()  # until the command runs (cli/__init__.py)
    from ftis_node.cli.app import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
