"""Print the rewards in a file of `ftis-node replay export --format envelope`: `decode_envelope.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from ftis_node import decode_envelope

if __name__ == "__main__":
    group = decode_envelope(Path(sys.argv[1]).read_bytes())
    print(group.sender, group.rewards)
