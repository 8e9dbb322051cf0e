"""What `make scan` looks for: faults that bandit knows, secrets in the repository, dependencies with known holes."""
