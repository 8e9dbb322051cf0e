"""A bootstrap node: its process, its view of the directory, and its page, JSON and metrics."""
