"""Durable replay buffer on the local disk (SQLite, WAL)."""

from __future__ import annotations
