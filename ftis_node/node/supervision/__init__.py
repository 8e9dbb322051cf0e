"""Watchdog of the event loop, threads for blocking work, process limits, and shutdown of the node."""
