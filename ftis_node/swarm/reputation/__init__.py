"""What a peer did, how much it may send, and when it is banned."""

from __future__ import annotations
