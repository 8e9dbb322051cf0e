"""Observation of a node from outside, and the evidence of a violation."""
