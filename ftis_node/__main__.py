"""The console script `ftis-node`, and `python -m ftis_node`."""

from __future__ import annotations

from ftis_node.cli import pause_collection


def main() -> None:
    """Run the command line."""
    pause_collection()  # until the command runs
    from ftis_node.cli.app import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
