"""One view of a swarm, from the directory's signed records."""
