"""Detection of stuck tasks, threads for blocking work, process limits, and shutdown of the node."""
