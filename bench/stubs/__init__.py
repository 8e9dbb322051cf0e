"""Stand-ins for benchmarks and tests: models with random weights, a node without a model, groups in good form."""
