"""The durable local replay buffer (SQLite, WAL)."""

from __future__ import annotations
