"""Nodes of benchmarks: in separate processes, slowed ones, and plain calls as a baseline."""
