"""Invariants that must hold after each fault: the checks, by subject."""
