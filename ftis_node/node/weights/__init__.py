"""Weights on their way: to the engine of this node, and between nodes."""
