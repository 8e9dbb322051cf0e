"""Isolated scoring: a separate process scores completions under time limits."""
