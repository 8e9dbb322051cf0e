"""Stuck tasks, blocking work, limits of the process, and the end of the node."""
