"""Durable replay buffer on the local disk (SQLite, WAL)."""
