"""The command `python -m tests.chaos.power`, see endurance.py."""

from __future__ import annotations

import sys

from tests.chaos.power.endurance import main

if __name__ == "__main__":
    sys.exit(main())
