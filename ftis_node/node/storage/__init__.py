"""The home of a node: its buffer, disk use, cleanup and log rotation."""
