"""What the node says of itself: log lines, the event trail, the status snapshot, metrics."""

from __future__ import annotations
