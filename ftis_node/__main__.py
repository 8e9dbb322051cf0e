"""`python -m ftis_node` runs `ftis-node`."""

from __future__ import annotations

from ftis_node.cli.app import main

if __name__ == "__main__":
    main()
