"""Which announced groups this node pulls, from which peer, and when."""

from __future__ import annotations
