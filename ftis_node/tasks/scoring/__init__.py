"""Isolated scoring: a process of its own scores completions under time limits."""
