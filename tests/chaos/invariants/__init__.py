"""The invariants that must hold after each fault, by subject."""
