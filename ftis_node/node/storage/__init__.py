"""The home of a node: its buffer, files of offered weights, disk use, cleanup and log rotation."""
