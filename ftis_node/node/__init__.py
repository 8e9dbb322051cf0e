"""The daemon: the state of a node, its named loops, and the storage of its home (the data directory)."""
