"""Pauses of a node: by command, and by the schedule of its settings."""
