"""The nodes that benchmarks of the network run: real ones, and the plain calls that they are compared with."""
