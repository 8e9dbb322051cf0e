"""The nodes that benchmarks run: real ones, slowed ones, and the plain calls that they are compared with."""
