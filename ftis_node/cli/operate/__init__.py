"""Commands that operate a running node."""
