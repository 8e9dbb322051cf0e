"""Experiments: trials of a swarm with one method and one seed, their parameters, and the raw results."""
