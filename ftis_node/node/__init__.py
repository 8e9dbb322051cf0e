"""The daemon: what a node keeps, the named loops over it, and what commands do to a home."""
