"""Loss of power: kills of all processes of a node, and writes that were not synchronized to disk."""
