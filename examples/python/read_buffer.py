"""Print the mean reward of each sender in a node's buffer: `read_buffer.py HOME`."""

from __future__ import annotations

import sys

from ftis_node import ReplayBuffer

if __name__ == "__main__":
    frame = ReplayBuffer.open(sys.argv[1]).to_pandas()
    print(frame.groupby("sender")["reward"].agg(["count", "mean"]).to_string())
