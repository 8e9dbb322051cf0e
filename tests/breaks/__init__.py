"""Known faults as text substitutions, applied one by one to a copy of the tree to see whether a test fails."""
