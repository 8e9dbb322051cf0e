"""The home of a node: its buffer and its disk space."""
