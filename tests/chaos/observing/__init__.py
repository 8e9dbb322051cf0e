"""Observation of a node from outside, and the evidence that is kept of a violation."""
