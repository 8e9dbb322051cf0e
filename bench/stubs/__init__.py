"""Stubs for benchmarks and tests: models with random weights, a node without a model, valid groups."""
